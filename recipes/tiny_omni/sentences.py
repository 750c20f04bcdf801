"""What is said in the clips: made-up everyday sentences, cut into words so that a speaker can pause between them."""

import zlib

import numpy as np

_SLOTS = tuple(
    line.split()
    for line in (
        "今天 昨晚 清晨 傍晚 周末 去年 刚才 夏天 雨后 上午 近来 往常 中午 午后 半夜 春节",
        "我们 老师 孩子 邻居 医生 朋友 司机 同学 奶奶 船长 演员 画家 木匠 队长 店主 作家",
        "在公园 去北京 到河边 在家里 上高山 在车站 去市场 到海边 在学校 进花园 在桥头 去乡下",
        "散步 唱歌 读书 买菜 写信 拍照 下棋 种花 画画 喝茶 修车 看戏 讲课 钓鱼 做饭 跳舞",
        "很高兴 没回家 不怕冷 到天黑 忘了伞 真热闹 也不累 挺安静 有收获 等客人",
    )
)
_TIME, _WHO, _WHERE, _WHAT, _END = range(5)
_SHAPES = {
    3: ((_TIME, _WHO, _WHAT),),
    4: ((_TIME, _WHO, _WHERE, _WHAT), (_TIME, _WHO, _WHAT, _END), (_WHO, _WHERE, _WHAT, _END)),
    5: ((_TIME, _WHO, _WHERE, _WHAT, _END),),
}
_HELD_OUT_SHARE = 5  # one sentence in five


def is_held_out(words: tuple[str, ...]) -> bool:
    """Whether a sentence is kept for the held-out set. A property of the text, so the two sets can never meet."""
    return zlib.crc32("".join(words).encode()) % _HELD_OUT_SHARE == 0


def draw_sentence(rng: np.random.Generator, num_words: int, *, held_out: bool) -> tuple[str, ...]:
    """A sentence of 3 to 5 words from its side of the split."""
    while True:
        shape = _SHAPES[num_words][rng.integers(len(_SHAPES[num_words]))]
        words = tuple(str(rng.choice(_SLOTS[slot])) for slot in shape)
        if is_held_out(words) == held_out:
            return words
