"""Generates the models of this directory from those of examples/models, with a smaller vocabulary that loads faster.

The special tokens, the chat template, and the first merges are kept.
"""

import gzip
import json
import pathlib
import shutil

MERGES = 8000
HERE = pathlib.Path(__file__).parent
MODELS = HERE.parents[2] / "examples" / "models"


def reduce(source, target):
    target.mkdir(exist_ok=True)
    with gzip.open(source / "tokenizer.json.gz") as file:
        tokenizer = json.load(file)
    model = tokenizer["model"]
    merges = model["merges"][:MERGES]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    kept = {left + right for left, right in pairs}
    model["merges"] = merges
    model["vocab"] = {token: id for token, id in model["vocab"].items() if len(token) == 1 or token in kept}
    # The special tokens follow without a gap, because the fast tokenizer needs contiguous ids.
    ids = {}
    for token in tokenizer["added_tokens"]:
        ids[str(token["id"])] = token["id"] = len(model["vocab"]) + len(ids)
    text = json.dumps(tokenizer, ensure_ascii=False).encode()
    (target / "tokenizer.json.gz").write_bytes(gzip.compress(text, mtime=0))
    config = json.loads((source / "tokenizer_config.json").read_text())
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(ids[id]): token for id, token in decoder.items()}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    shutil.copy(source / "config.json", target / "config.json")


reduce(MODELS / "qwen2.5", HERE / "qwen2.5-small")
