"""Shows the library in one page: continues a few prompts with most of the model outside the GPU.

python scripts/examples/generate.py                          # the small model of the package
python scripts/examples/generate.py --model facebook/opt-30b --percent 10 90 0 100 100 0
"""

from __future__ import annotations

import argparse

from flexgen_jax import LLM, Policy, SamplingParams, set_up_jax

PROMPTS = [
    "The people of the United States",
    "In the beginning",
    "It was a dark and stormy night, and the captain",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face folder or hub id")
    parser.add_argument("--offload-dir", help="a folder on a fast disk")
    parser.add_argument(
        "--percent",
        type=float,
        nargs=6,
        default=[50, 50, 0, 100, 100, 0],
        help="weights on GPU and CPU, KV cache on GPU and CPU, activations on GPU and CPU",
    )
    args = parser.parse_args()

    set_up_jax()
    policy = Policy.from_percent(*args.percent, batch_size=2, num_batches=2)
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=1)
    with LLM(args.model, policy=policy, offload_dir=args.offload_dir, progress=True) as llm:
        for result in llm.generate(PROMPTS, params):
            print(f"{result.prompt}|{result.text}  [{result.finish_reason}]\n")
        report = llm.report()
    print(f"{report['generation_throughput']:.1f} token/s, weights {report['realized']['weights']}")


if __name__ == "__main__":
    main()
