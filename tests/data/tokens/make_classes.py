"""Records which tokenizer class transformers and vLLM select for a model's files, and which tokens each class produces.

Run it in the project folder with a Python that has both packages (only a list of vLLM is read, and torch is not needed):

    python tests/data/tokens/make_classes.py            # writes the three files below
    python tests/data/tokens/make_classes.py --check    # prints the files that would change, and exits with 1 if there are any

* crates/tokens/src/prompt/rebuild/transformers.json: the table that warmroute uses, from the mapping of transformers.
* tests/data/tokens/classes/chosen.json: the class that the engine selects, for every model type and many class names.
* tests/data/tokens/classes/encodings.json.gz: tokens of unusual texts by small tokenizers, for every class.
"""

import ast
import copy
import gzip
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tokenizers
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import TokenizersBackend
from transformers.models.auto import tokenization_auto as auto
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

HERE = pathlib.Path(__file__).parent
TABLE = HERE.parents[2] / "crates/tokens/src/prompt/rebuild/transformers.json"

VLLM = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def as_written():
    """Returns the model types for which vLLM uses only `tokenizer.json`."""
    for node in ast.parse((VLLM / "tokenizers/registry.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and node.target.id == "_MODEL_TYPES_WITH_INCORRECT_TOKENIZER_CLASS":
            return sorted(ast.literal_eval(node.value))
    raise SystemExit("the list of model types was not found in vLLM")


# If the mapping depends on a package for Mistral's own format, vLLM uses the usual class.
OWN_FORMAT = "MistralCommonBackend"
BARE = {"TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", OWN_FORMAT}


def kind(cls):
    if cls.__name__ in BARE:
        return "written"
    if not issubclass(cls, TokenizersBackend):
        return "python"
    return "rebuilt" if "__init__" in cls.__dict__ else "written"


def table():
    """Returns the class of each model type, and how each class uses `tokenizer.json`."""
    mapping = {model: name.removesuffix("Fast") for model, name in auto.TOKENIZER_MAPPING_NAMES.items() if name}
    mapping = {model: "TokenizersBackend" if name == OWN_FORMAT else name for model, name in mapping.items()}
    names = {name for name in mapping.values()}
    names |= {name.removesuffix("Fast") for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    classes = {}
    for name in sorted(names):
        try:
            cls = auto.tokenizer_class_from_name(name)
            cls = cls or auto.tokenizer_class_from_name(name + "Fast")
            does = kind(cls)
        except Exception:
            continue
        # All names of a rebuilt class refer to the same entry.
        classes[name] = does if does != "rebuilt" else cls.__name__
    return {
        "transformers": transformers.__version__,
        "vllm": importlib.metadata.version("vllm").split("+")[0],
        "models": dict(sorted(mapping.items())),
        "forced": sorted(auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS),
        "as_written": as_written(),
        "classes": classes,
    }


def load(tokenizer, tokenizer_config, config):
    with tempfile.TemporaryDirectory() as folder:
        for name, content in [
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", tokenizer_config),
            ("config.json", config),
        ]:
            if content is not None:
                (pathlib.Path(folder) / name).write_text(json.dumps(content))
        # The same choice as in vllm/tokenizers/registry.py.
        loader = TokenizersBackend if config and config["model_type"] in as_written() else auto.AutoTokenizer
        own = {} if loader is TokenizersBackend else {"mistral_format": False}
        return loader.from_pretrained(folder, truncation_side="left", **own)


NAMED = [
    None, "TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "LlamaTokenizer", "LlamaTokenizerFast",
    "CodeLlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "Qwen3_5Tokenizer", "GemmaTokenizerFast", "GPT2Tokenizer",
    "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "CohereTokenizerFast", "T5TokenizerFast", "BertTokenizer",
    "BloomTokenizerFast", "XLMRobertaTokenizerFast", "NotInTransformers", "ByT5Tokenizer",
]  # fmt: skip


def chosen():
    """Returns the class whose `from_pretrained` the engine calls."""
    real = PreTrainedTokenizerBase.__dict__["from_pretrained"]
    PreTrainedTokenizerBase.from_pretrained = classmethod(lambda cls, *args, **kwargs: Chosen(cls))
    all_models = [*auto.TOKENIZER_MAPPING_NAMES, *as_written()]
    all_models = sorted({*all_models, "llama", "llama4", "gpt_oss", "not_in_transformers"})
    names, rows = [], {}
    for name in NAMED:
        row = []
        for model in all_models:
            config = {"model_type": model, "architectures": ["X"]}
            try:
                cls = load(None, {"tokenizer_class": name} if name else {}, config).cls
                got = "TokenizersBackend" if cls.__name__ in BARE else cls.__name__
            except Exception as error:
                got = f"! {type(error).__name__}"
            if got not in names:
                names.append(got)
            row.append(names.index(got))
        rows[name or ""] = row
    PreTrainedTokenizerBase.from_pretrained = real
    return {"models": all_models, "classes": names, "chosen": rows}


class Chosen:
    def __init__(self, cls):
        self.cls = cls


TEXTS = [
    "", " ", "  ", "hello", " hello", "  hello world", "hello\n\n  world \n", "a\tb\r\nc", "I'll we've IT'S don't",
    "12345 1,234.5", "x=1;\n\tif (x) { y(); }\n", "café cafe\u0301 ﬁ Å A\u030a", "नमस्ते दुनिया", "สวัสดีครับ", "한국어 텍스트",
    "日本語のテキスト。中文，标点", "👩‍👩‍👧‍👦 🇩🇪 e\u0301\u0302\u0323", "ا\u064eل\u0652ع\u064e", "\u00a0nbsp\u2003em\u200bzero", "▁under ▁ bar",
    "<s>hello</s> world", "<|endoftext|> x <|im_start|>user\nhi<|im_end|>", "<unk><pad><mask>", "<tool> a <tool>b",
    "foo<|im_end|>  bar", "....!!!???", "UPPERlowerMIXED", "\u0000\u0001\ufffd", "a" * 50, " \n \n\n  \t x",
]  # fmt: skip


def corpus():
    return [text * 3 for text in TEXTS if text] + [
        "the quick brown fox jumps over the lazy dog and runs away from it, hello world user",
        "we will don't can't won't it's they've she'll naming function return value",
    ] * 5  # fmt: skip


def added(tokenizer, tokens):
    tokenizer.add_tokens(
        [AddedToken(text, special=special, normalized=normalized, lstrip=lstrip, rstrip=rstrip)
         for text, special, normalized, lstrip, rstrip in tokens]
    )  # fmt: skip


def of_bytes():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<bos>", "<eos>",
               "<UNK>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<|padding|>"]  # fmt: skip
    added(tokenizer, [(text, True, False, False, False) for text in special] + [("<tool>", False, False, True, True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    whole = json.loads(tokenizer.to_str())
    # No class of transformers sets this pre-tokenizer itself.
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+|[^\\s\\p{N}]+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    return whole


def of_pieces():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=520,
        initial_alphabet=["▁"],
        limit_alphabet=60,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"] + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    whole = json.loads(tokenizer.to_str())
    keep = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>"]
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] in keep]
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    added(tokenizer, [("<|im_start|>", True, False, False, False), ("<tool>", False, True, False, True)])
    ids = {token: tokenizer.token_to_id(token) for token in ["<s>"]}
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=list(ids.items()))
    whole = json.loads(tokenizer.to_str())
    whole["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
    }
    whole["pre_tokenizer"] = None
    return whole


def decoder_of(whole, change=None):
    out = {}
    for token in whole["added_tokens"]:
        token = dict(token)
        out[str(token.pop("id"))] = {**token, **(change or {}).get(token["content"], {})}
    return out


BYTES = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def cases(files):
    bare = {"bytes": BYTES, "pieces": PIECES}
    rows = []
    for name, model in [
        ("Qwen2TokenizerFast", "qwen3"), ("PreTrainedTokenizerFast", "qwen2"), ("Qwen2Tokenizer", "qwen3_5"),
        ("Qwen2Tokenizer", "qwen3_5_text"), ("TokenizersBackend", "qwen3_5_moe"), (None, "qwen3_5"), ("Qwen2Tokenizer", "qwen4_exp"),
        ("GPT2TokenizerFast", "gpt2"), ("GPT2Tokenizer", "phi"), ("GPTNeoXTokenizerFast", "gpt_neox"), (None, "olmo"),
        ("CohereTokenizerFast", "cohere"), ("CohereTokenizer", "cohere2"), ("PreTrainedTokenizerFast", "llama"),
        ("LlamaTokenizerFast", "deepseek_v3"), ("Qwen2Tokenizer", "internlm2"), ("NotInTransformers", "nemotron"),
        ("GPT2Tokenizer", "granite"), (None, "not_in_transformers"), ("Qwen2Tokenizer", "step3_vl"), ("GPT2Tokenizer", "starcoder2"),
    ]:  # fmt: skip
        rows.append(("bytes", name, model, {}))
    for name, model in [
        ("LlamaTokenizer", "llama"), ("LlamaTokenizerFast", "mistral"), ("LlamaTokenizerFast", "llama4"), (None, "idefics2"),
        ("GemmaTokenizerFast", "gemma3"), (None, "gemma2"), ("GemmaTokenizer", "gemma3n"), ("LlamaTokenizerFast", "phi3"),
        ("LlamaTokenizer", "gemma2"), ("PreTrainedTokenizerFast", "llama"),
    ]:  # fmt: skip
        rows.append(("pieces", name, model, {}))
    for legacy in (True, False, None):
        for prefix in (True, False, None):
            rows.append(("pieces", "LlamaTokenizer", "llama", {"legacy": legacy, "add_prefix_space": prefix}))
    for prefix in (True, False, None):
        for name, model in [("Qwen2Tokenizer", "qwen3"), ("Qwen3_5Tokenizer", "qwen3_5"), ("GPT2Tokenizer", "gpt2"),
                            ("GPTNeoXTokenizer", "gpt_neox"), ("CohereTokenizer", "cohere")]:  # fmt: skip
            rows.append(("bytes", name, model, {"add_prefix_space": prefix}))
    for which, name, model in [("bytes", "Qwen2Tokenizer", "qwen3"), ("bytes", "PreTrainedTokenizerFast", "llama"),
                               ("pieces", "LlamaTokenizer", "llama"), ("pieces", "GemmaTokenizer", "gemma2"),
                               ("pieces", "PreTrainedTokenizerFast", "llama"), ("bytes", "GPTNeoXTokenizer", "gpt_neox")]:  # fmt: skip
        rows.append((which, name, model, {"added_tokens_decoder": decoder_of(files[which])}))
        changed = {"<tool>": {"lstrip": False, "rstrip": False, "normalized": False}}
        rows.append((which, name, model, {"added_tokens_decoder": decoder_of(files[which], changed)}))
        changed = {"<tool>": {"special": True}}
        rows.append((which, name, model, {"added_tokens_decoder": decoder_of(files[which], changed)}))
        rows.append((which, name, model, {"additional_special_tokens": ["<new>", "<tool>"]}))
        rows.append((which, name, model, {"pad_token": "hello"}))
        rows.append((which, name, model, {"pad_token": "<fresh>", "image_token": "<picture>"}))
        rows.append((which, name, model, {"add_bos_token": True, "bos_token": "<s>"}))
        rows.append((which, name, model, {"add_bos_token": False, "add_eos_token": True}))
        rows.append((which, name, model, {"split_special_tokens": True}))
    out = []
    for which, name, model, more in rows:
        settings = {**bare[which], **{key: value for key, value in more.items() if value is not None}}
        if name:
            settings["tokenizer_class"] = name
        out.append((which, settings, {"model_type": model, "architectures": ["X"]}))
    # The class is in the model's config.json.
    out.append(("bytes", dict(BYTES), {"model_type": "qwen3", "tokenizer_class": "GPT2Tokenizer"}))
    out.append(("bytes", dict(BYTES), {"model_type": "not_in_transformers", "tokenizer_class": "Qwen2TokenizerFast"}))
    # Without these added tokens, some special tokens of a class are not in the file.
    without = ["<|endoftext|>", "<s>", "<mask>", "<UNK>", "<|padding|>"]
    for which, name, model in [("bytes", "Qwen2Tokenizer", "qwen3"), ("bytes", "GPT2Tokenizer", "gpt2"), ("bytes", "GPTNeoXTokenizer", "gpt_neox"),
                               ("bytes", "CohereTokenizer", "cohere"), ("bytes", "Qwen3_5Tokenizer", "qwen3_5"),
                               ("pieces", "LlamaTokenizer", "llama"), ("pieces", "GemmaTokenizer", "gemma2")]:  # fmt: skip
        key = which + "-fewer"
        if key not in files:
            fewer = copy.deepcopy(files[which])
            fewer["added_tokens"] = [token for token in fewer["added_tokens"] if token["content"] not in without]
            first = min(token["id"] for token in fewer["added_tokens"] if token["id"] >= len(fewer["model"]["vocab"]))
            for token in fewer["added_tokens"]:
                if token["id"] >= first:
                    break
            number = len(fewer["model"]["vocab"])
            for token in fewer["added_tokens"]:
                if token["content"] not in fewer["model"]["vocab"]:
                    token["id"], number = number, number + 1
            fewer["post_processor"] = None
            files[key] = fewer
        out.append((key, {"tokenizer_class": name}, {"model_type": model, "architectures": ["X"]}))
    return out


def encodings():
    # Training is not deterministic, so existing tokenizers are reused.
    path = HERE / "classes/encodings.json.gz"
    made = json.loads(gzip.decompress(path.read_bytes()))["tokenizers"] if path.exists() else {}
    files = {"bytes": made.get("bytes") or of_bytes(), "pieces": made.get("pieces") or of_pieces()}
    listed = []
    for which, settings, config in cases(files):
        entry = {"tokenizer": which, "tokenizer_config": settings, "config": config}
        try:
            tokenizer = load(files[which], settings, config)
            entry["class"] = type(tokenizer).__name__
            entry["bare"] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
            entry["special"] = [tokenizer(text)["input_ids"] for text in TEXTS]
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"[:200]
        listed.append(entry)
    return {"tokenizers": files, "texts": TEXTS, "cases": listed}


def main():
    written = {
        TABLE: json.dumps(table(), indent=1, ensure_ascii=False) + "\n",
        HERE / "classes/chosen.json": json.dumps(chosen(), separators=(",", ":")) + "\n",
        HERE / "classes/encodings.json.gz": json.dumps(encodings(), separators=(",", ":"), ensure_ascii=False),
    }
    stale = []
    for path, text in written.items():
        packed = path.suffix == ".gz"
        old = path.read_bytes() if path.exists() else b""
        old = gzip.decompress(old) if packed and old else old
        if old.decode() == text:
            continue
        stale.append(str(path))
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(text.encode(), mtime=0) if packed else text.encode())
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}:", stale or "no changes")
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
