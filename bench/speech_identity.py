"""Identity on speech, all held-out clips: edge against generate() of transformers, lossless against cloud.

python -m bench.speech_identity [--limit N]
"""

import argparse

import torch
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

import skydraft
from bench.speech import HELDOUT
from bench.workload import drafting
from skydraft import Engine, Generation, decoding_params
from skydraft.config import CAPTION_PROMPT
from skydraft.evaluation.workloads import read_prompts
from skydraft.models import cache_dir, resolve
from skydraft.prompts.audio import Audio, load_audio
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import PromptPair, read_prompt

_NUM_TOKENS = 80


def run(edge: Engine, cloud: Engine, mode: str, audio: Audio, temperature: float) -> Generation:
    """One finished generation without a style."""
    params = decoding_params(max_new_tokens=_NUM_TOKENS, temperature=temperature, seed=7)
    with skydraft.generate(edge=edge, cloud=cloud, plan=drafting(mode), params=params, audio=audio) as generation:
        return generation.run()


def generated(thinker: torch.nn.Module, prompts: PromptPair, end_ids: frozenset[int]) -> tuple[int, ...]:
    """What transformers' own greedy generate() says to the same prompt and features."""
    (media,), prompt = prompts.edge.media, torch.tensor([prompts.edge.token_ids])
    with torch.inference_mode():
        output = thinker.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            input_features=torch.tensor(media.features)[None],
            feature_attention_mask=torch.ones(1, media.num_frames, dtype=torch.long),
            max_new_tokens=_NUM_TOKENS,
            do_sample=False,
            eos_token_id=sorted(end_ids),
            pad_token_id=min(end_ids),
        )
    return tuple(output[0, prompt.shape[1] :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    edge, cloud = skydraft.load("tiny-omni-edge"), skydraft.load("tiny-omni-cloud")
    folder = resolve("tiny-omni-edge", cache_dir()).path
    thinker = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    same = dict.fromkeys(("edge == generate()", "lossless == cloud, T=0", "lossless == cloud, T=0.8"), 0)
    total = dict.fromkeys(same, 0)
    clips = read_prompts(HELDOUT, limit=given.limit).prompts
    for clip in clips:
        assert clip.audio is not None
        audio = load_audio(clip.audio)
        prompts = read_prompt(edge, asked(CAPTION_PROMPT, audio=audio))
        pairs = {
            "edge == generate()": (
                run(edge, cloud, "edge", audio, 0.0).token_ids, generated(thinker, prompts, edge.vocab.end_ids)
            ),
            **{
                f"lossless == cloud, T={temperature:g}": tuple(
                    run(edge, cloud, mode, audio, temperature).token_ids for mode in ("lossless", "cloud")
                )
                for temperature in (0.0, 0.8)
            },
        }  # fmt: skip
        for name, (ours, theirs) in pairs.items():
            total[name] += len(theirs)
            same[name] += len(theirs) if ours == theirs else 0
    for name in same:
        print(f"{name:<28}{same[name]} of {total[name]} tokens, {len(clips)} clips")


if __name__ == "__main__":
    main()
