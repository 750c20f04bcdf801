"""llama-server out of xllamacpp, as a process.

    python llama_server.py MODEL.gguf PORT [SLOTS [CONTEXT [THREADS]]] [--as-ours] [--kv-unified]

With --as-ours it keeps the values of its cache in bfloat16 and reads prompts in parts of 128, as skydraft's own engine.
With --kv-unified all slots share one cache, as by default in llama-server; else a step takes a forward for each run of
neighbouring slots that write.
Runs in an environment that has xllamacpp and nothing of ours. It ends when its standard input does, so that it never
outlives the tests that started it.
"""

from __future__ import annotations

import os
import sys

from xllamacpp import CommonParams, Server, ggml_type

AS_OURS, KV_UNIFIED = "--as-ours", "--kv-unified"


def main(model: str, port: str, slots: str = "2", context: str = "4096", threads: str = "1") -> None:
    params = CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    if AS_OURS in sys.argv:
        params.cache_type_v, params.n_ubatch = ggml_type.GGML_TYPE_BF16, 128
    params.kv_unified = KV_UNIFIED in sys.argv
    server = Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # its destructor waits for requests that are still being answered


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word not in (AS_OURS, KV_UNIFIED)))
