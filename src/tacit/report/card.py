"""The model card of an exported model: what it is, how to load it, and what is guaranteed."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.privacy.statement import Statement
from tacit.report.compare import Run, judged_by, rows


def card(
    run: Run,
    statement: Statement | None,
    labels: Sequence[str],
    loading: str,
    base: str | None,
    inputs: str,
    personal: Sequence[str] = (),
    adapter: bool = False,
) -> str:
    """The README.md of an export. Metrics on the test set are exact, and outside the guarantee.

    `base`: the hub name of the model that training started from. `personal`: what each client trained for
    itself. `adapter`: only adapters were trained, and peft loads them.
    """
    table = rows([run])
    metric = judged_by(table)
    if statement is not None and not run.simulated:
        # Clients' own records are protected, but a card is public.
        metric = metric.common
    last = table[0].last(metric.name)
    data, model = run.config.get("data") or {}, run.config.get("model") or {}
    method = run.passed["algorithm"].name if "algorithm" in run.passed else run.config["method"]["name"]
    network = run.passed["model"].name if "model" in run.passed else model.get("name") or model.get("hub")
    head = ["---", "library_name: peft" if adapter else "tags: [federated-learning]"]
    head += [f"base_model: {base}"] if base else []
    own = metric != metric.common
    tested = "on clients' own test records, each with its own part" if own else "on its test set"
    score = "" if last is None else f" {metric.text(last.mean)} {tested}, after {run.rounds_done:,} rounds."
    if personal:
        score += (
            f" Each client trained {', '.join(personal)} for itself; here is the initial one, which nobody "
            f"trained{'' if own else ', and which that number is with'}: train it before use."
        )
    lines = [
        *head, "---", "", f"# {run.config.get('name', run.folder.name)}", "",
        f"{network or 'A transformers model'}, trained with {method} on {data.get('name')}.{score}",
        "" if run.finished else f"\nThe run was not finished: {run.rounds_done:,} of {run.planned:,} rounds.",
        "", "## Loading", "", "```python", loading, "```", *(["", inputs] if inputs else []),
        "", "## Privacy", "",
    ]  # fmt: skip
    if statement is None:
        lines.append("No differential privacy: the model may show anything about the data it was trained on.")
    else:
        lines += [statement.summary(), "", "```", statement.text(), "```"]
    if labels:
        lines += ["", "## Labels", "", *(f"- {n}: {name}" for n, name in enumerate(labels))]
    return "\n".join(lines) + "\n"


def loading(kind: str, folder: str, module: str | None = None) -> str:
    """Python code that loads an export of this kind from the folder above it, since a card goes to other
    machines.
    """
    place = repr(folder)
    if kind == "transformers":
        return f"from transformers import {module}\n\nmodel = {module}.from_pretrained({place})"
    if kind == "peft" and module is not None:
        return f"from peft import {module}\n\nmodel = {module}.from_pretrained({place})"
    if kind == "tacit":
        return (
            "import json\n\nfrom safetensors.torch import load_file\nfrom tacit import models\n\n"
            f"how = json.load(open({place} + '/config.json'))\n"
            "model = models.build(how.pop('tacit'), how.pop('shape'), how.pop('classes'), **how)\n"
            f"model.load_state_dict(load_file({place} + '/model.safetensors'))"
        )
    named = module or "your module"
    return (
        f"from safetensors.torch import load_file\n\nmodel = ...  # {named}, built as for the run\n"
        f"model.load_state_dict(load_file({place} + '/model.safetensors'))"
    )
