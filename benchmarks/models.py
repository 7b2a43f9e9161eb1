"""What becomes of many models: traced, and how much of their work a plan can split.

    python benchmarks/models.py [--only NAME ...] [--rows FILE] [--out docs/models.md]

The models are those of `tests/model_zoo`: small random configurations of the architectures of
transformers and some written in plain PyTorch, in training mode. The document has one row for each.
With `--rows` what is found of each model is appended to a file, and a run that was stopped goes on
from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

HEAD = """# Models

What the compiler makes of {count} models, each a small random configuration of the class named,
in training mode. `python benchmarks/models.py` writes this page; versions: torch {torch},
transformers {transformers}.

- *operators*: how many calls the traced graph has.
- *split*: the share of the model's forward floating point operations in calls that a plan may
  split. A module that runs whole counts what it was seen to compute; another operator nothing is
  known of, one operation for each of its elements (too few for a stretch of code whose shapes
  depend on data).
- *left whole*: the other calls, with their share of the work where it is 0.1 % or more, and why.

{equal}

{traced} of {count} models are traced. Averaged over them, each counting alike, {share:.2%} of the
work may be split.
"""

EQUAL = """\
Names in **bold** are those of the test `tests/models/test_zoo.py`: under the searched plan and one
drawn at random on a 2x2 mesh, outputs, loss, every gradient and every buffer equal the single
device, in training and in evaluation mode. `make zoo` checks all models so, on three ranks as well,
under five plans drawn at random."""

#: A share of work below which an operator that is left whole is only named.
WORTH_SAYING = 1e-3


def row(name: str) -> dict[str, Any]:
    """One model: what its trace is like, or why there is none."""
    from autopar.compiler import Request, trace_model
    from autopar.ir.errors import AutoparError
    from autopar.ir.mesh import Mesh
    from model_zoo import MODELS, build_entry
    from model_zoo.survey import survey

    entry = MODELS[name]
    mode = entry.modes[0]
    model, call = build_entry(entry, mode)
    request = Request.make(Mesh.of({"dp": 2, "tp": 2}), None, None, None, "sharded")
    found: dict[str, Any] = {"name": name, "kind": type(model).__name__, "mode": mode}
    try:
        found["survey"] = asdict(survey(trace_model(model, (), call, request)))
    except AutoparError as error:
        found["error"] = _without_paths(str(error))
    return found


def known_rows(path: Path | None) -> dict[str, dict[str, Any]]:
    """The rows that an earlier run wrote, by model."""
    if path is None or not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {found["name"]: found for found in rows}


def _without_paths(text: str) -> str:
    """A message with file names alone, as paths differ from machine to machine."""
    words = [w.rpartition("/")[2] if "/" in w and ".py" in w else w for w in text.split(" ")]
    return " ".join(w.replace("|", "\\|") for w in words)


def cells(found: dict[str, Any], checked: Iterable[str]) -> list[str]:
    name = f"**{found['name']}**" if found["name"] in checked else found["name"]
    kind = f"`{found['kind']}`"
    if "error" in found:
        return [name, kind, "", "", f"not traced: {found['error']}"]
    survey = found["survey"]
    whole: Counter[tuple[str, str]] = Counter()
    share: dict[tuple[str, str], float] = {}
    for kept in survey["whole"]:
        key = (_short(kept["op"]), kept["reason"].replace("|", "\\|"))
        whole[key] += kept["calls"]
        share[key] = share.get(key, 0.0) + kept["share"]
    said = []
    for (op, reason), calls in whole.items():
        part = share[op, reason]
        times = f" ({calls}x)" if calls > 1 else ""
        if part >= WORTH_SAYING:
            said.append(f"`{op}`{times} {part:.1%}: {reason}")
        else:
            said.append(f"`{op}`{times}")
    text = "; ".join(said) + (" (eval mode)" if found["mode"] == "eval" else "")
    return [name, kind, str(survey["operators"]), f"{survey['split']:.1%}", text]


def _short(op: str) -> str:
    """`cat` for ``aten.cat.default``; a call that stays whole without the digits of its name."""
    namespace, _, rest = op.partition(".")
    plain = rest.rpartition(".")[0] or rest
    return plain.rpartition("_")[0] if namespace == "autopar_whole" else plain


def write(families: dict[str, list[dict[str, Any]]], checked: Iterable[str], out: Path) -> None:
    import torch
    import transformers

    rows = [found for family in families.values() for found in family]
    surveys = [found["survey"] for found in rows if "survey" in found]
    text = HEAD.format(
        count=len(rows),
        traced=len(surveys),
        share=sum(s["split"] for s in surveys) / max(1, len(surveys)),
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
        equal=EQUAL,
    )
    for family, members in families.items():
        if not members:
            continue
        text += f"\n## {family[0].upper()}{family[1:]}\n\n"
        text += "| model | class | operators | split | left whole |\n"
        text += "| --- | --- | ---: | ---: | --- |\n"
        for found in members:
            text += "| " + " | ".join(cells(found, checked)) + " |\n"
    out.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, help="names of models")
    parser.add_argument("--rows", type=Path, default=None, help="file of rows, one a line")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    import torch

    from model_zoo import CHECKED, FAMILIES

    torch.set_num_threads(1)
    families: dict[str, list[dict[str, Any]]] = {}
    known = known_rows(options.rows)
    for family, entries in FAMILIES.items():
        families[family] = []
        for entry in entries:
            if options.only is not None and entry.name not in options.only:
                continue
            if entry.name in known:
                families[family].append(known[entry.name])
                continue
            began = time.perf_counter()
            found = row(entry.name)
            families[family].append(found)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            print(f"{entry.name:28} {time.perf_counter() - began:6.1f} s", flush=True)
    write(families, CHECKED, options.out)


if __name__ == "__main__":
    main()
