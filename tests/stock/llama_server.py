"""llama-server out of xllamacpp, as a process.

    python llama_server.py MODEL.gguf PORT [SLOTS [CONTEXT [THREADS]]] [--kv-unified]

With --kv-unified all slots share one cache, as by default in llama-server; else a step takes a forward for each run of
neighbouring slots that write.
Runs in an environment that has xllamacpp and nothing of ours. It ends when its standard input does, so that it never
outlives the tests that started it.
"""

import os
import sys

from xllamacpp import CommonParams, Server

KV_UNIFIED = "--kv-unified"


def main(model: str, port: str, slots: str = "2", context: str = "4096", threads: str = "1") -> None:
    params = CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.kv_unified = KV_UNIFIED in sys.argv
    server = Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # its destructor waits for requests that are still being answered


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != KV_UNIFIED))
