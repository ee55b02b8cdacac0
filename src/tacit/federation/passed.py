"""What a run was given as objects instead of by name: `objects.json` in its folder.

A config names everything else; without this file two runs with different networks or algorithms of one's own
would look like two seeds of the same experiment, and a resume could go on with another algorithm.

Each object is kept as its class, its plain options and a fingerprint. The fingerprint covers what the object
does: of an algorithm, a task, a sampler or an optimizer its code (without comments and layout), of a network
the names, shapes and kinds of its parts, of data their contents. A network's first weights have one of their
own, since they may differ between seeds.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tacit.data import Dataset, Records
from tacit.data.identity import contents
from tacit.errors import UserError
from tacit.federation.files import sealed, unsealed, write_atomically
from tacit.reading import read_text

OBJECTS = "objects.json"
OPTIMIZER = "optimizer"
"""The one role whose object is what makes the thing: the server has the parameters that it needs."""
TRAINED_BY = "_tacit_run"
"""Where a module keeps the folder of the run that trained it."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Passed:
    """One object, as far as it can be told apart from another of its kind."""

    kind: str
    """Its class, with the module."""
    options: dict[str, Any]
    fingerprint: str
    weights: str | None = None
    """Of a network's parameters and buffers at the start; not part of what a resume must match."""

    @property
    def name(self) -> str:
        return self.kind.rpartition(".")[2]

    def text(self) -> str:
        """As one would write it."""
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def describe(**objects: Any) -> dict[str, Passed]:
    """What can be told of the objects that are not None."""
    found = {}
    for role, thing in objects.items():
        if thing is None:
            continue
        if role == OPTIMIZER:
            found[role] = _factory(thing)
            continue
        if isinstance(thing, type):
            raise UserError(
                f"{role}: {thing.__name__} is a class; pass an instance of it, {role}={thing.__name__}(…)"
            )
        kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
        if isinstance(thing, nn.Module):
            found[role] = Passed(kind, {}, _structure(thing), _weights(thing))
        elif isinstance(thing, Dataset):
            found[role] = Passed(kind, {"name": thing.name}, _contents(thing))
        else:
            options = _options(thing)
            found[role] = Passed(kind, options, _digest(_code(type(thing))))
    return found


def _factory(thing: Any) -> Passed:
    """A class of optimizers, or a partial of one with its options, or any other callable."""
    if isinstance(thing, Optimizer):
        raise UserError(
            f"optimizer: this {type(thing).__name__} already has its parameters; the server brings its own: "
            f"pass the class, or functools.partial({type(thing).__name__}, …)"
        )
    made, options = thing, {}
    if isinstance(thing, partial):
        made, options = thing.func, {**{f"_{i}": a for i, a in enumerate(thing.args)}, **thing.keywords}
    if not callable(made):
        raise UserError(f"optimizer: a {type(made).__name__} makes no optimizer; pass a class of torch.optim")
    if not hasattr(made, "__qualname__"):  # an object that is called
        made, options = type(made), _options(made)
    kind = f"{made.__module__}.{made.__qualname__}"
    code = _code(made) if isinstance(made, type) else _source(made)
    return Passed(kind, {name: _plain(value) for name, value in options.items()}, _digest(code))


def write_passed(folder: Path, passed: Mapping[str, Passed]) -> None:
    """Write down what a run was given, also if that is nothing."""
    plain = {role: asdict(one) for role, one in passed.items()}
    write_atomically(folder / OBJECTS, sealed(plain, indent=1))


def read_passed(folder: Path) -> dict[str, Passed] | None:
    """What a run was given; None of a run that did not write it down."""
    file = folder / OBJECTS
    if not file.exists():
        return None
    try:
        plain = unsealed(read_text(file), indent=1)
        return {role: Passed(**facts) for role, facts in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it") from None


def refuse_others(folder: Path, given: Mapping[str, Any], verb: str = "resume") -> None:
    """Refuse objects that are not those the run was started with, and say what to pass."""
    known = read_passed(folder)
    if known is None:
        return
    now = describe(**given)
    objects = ", ".join(f"{role}={_written(role, known[role])}" for role in given if role in known)
    for role in given:
        was, has = known.get(role), now.get(role)
        if was is None and has is not None and verb == "resume":
            raise UserError(
                f"{folder}: this run's {role} came from its config, not from an object; leave {role}= out"
            )
        if was is not None and has is None:
            raise UserError(
                f"{folder}: this run was given its {role} as an object, {was.text()} of {_module(was)}; give "
                f"it again from Python: tacit.{verb}({_first(folder, verb)}, {objects})"
            )
        if was is None or has is None or replace(was, weights=None) == replace(has, weights=None):
            continue
        if was.text() != has.text() or was.kind != has.kind:
            what = f"this is {has.text()} of {_module(has)}"
        else:
            part = {"model": "other layers", "dataset": "other records"}.get(role, "other code")
            what = f"this one has {part} than it had when the run began"
        raise UserError(
            f"{folder}: the run's {role} was {was.text()} of {_module(was)}, and {what}; pass the one it "
            "had, or start a new run"
        )


def _first(folder: Path, verb: str) -> str:
    """What the function takes before objects."""
    more = {"export": ", DIR", "test_clients": ", COUNT"}
    return f"{str(folder)!r}{more.get(verb, '')}"


def own_copy(model: nn.Module) -> nn.Module:
    """A copy to train, so that the caller's object stays as it is."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may hold anything
        raise UserError(
            f"model: {type(model).__name__} cannot be copied ({error}); a run trains a copy, so that your "
            "object stays as it is: keep tensors with a graph, locks and open files out of it"
        ) from None


def mark(model: nn.Module, folder: Path) -> nn.Module:
    """Remember in a module which run trained it: another run that is given it must count that run's cost.

    So does each of its parts, which may go into another module.
    """
    for part in model.modules():
        part.__dict__[TRAINED_BY] = str(folder.resolve())
    return model


def trained_by(model: nn.Module | None) -> list[Path]:
    """The runs that trained a module, or parts of it."""
    parts = () if model is None else model.modules()
    places = dict.fromkeys(part.__dict__[TRAINED_BY] for part in parts if TRAINED_BY in part.__dict__)
    for place in places:
        if not Path(place).is_dir():
            raise UserError(
                f"model: it was trained by the run in {place}, which is gone, and with it what that cost; "
                "restore the folder, pass an untrained model, or set model.public: true if nobody there "
                "needs it"
            )
    return [Path(place) for place in places]


def _written(role: str, one: Passed) -> str:
    """What to pass, in Python."""
    if role != OPTIMIZER:
        return one.text()
    return f"functools.partial({one.text().replace('(', ', ', 1)}" if one.options else one.name


def _module(one: Passed) -> str:
    return one.kind.rpartition(".")[0]


def _options(thing: Any) -> dict[str, Any]:
    values = (
        {f.name: getattr(thing, f.name) for f in fields(thing)}
        if is_dataclass(thing)
        else dict(vars(thing))
        if hasattr(thing, "__dict__")
        else {}
    )
    return {key: _plain(value) for key, value in values.items() if not key.startswith("_")}


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    return (
        f"{type(value).__name__} {_digest(repr(value))[:8]}"
        if " at 0x" not in repr(value)
        else (type(value).__name__)
    )


def _code(kind: type) -> list[str]:
    """The code of a class and of its parents outside of libraries, without comments and layout."""
    found = []
    for parent in kind.__mro__:
        if parent.__module__.split(".")[0] in ("builtins", "typing", "abc", "torch", "tacit"):
            continue
        found.append(_source(parent))
    return found


def _source(thing: Any) -> str:
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (OSError, TypeError, SyntaxError):  # typed into a shell: there is no source to read
        return str(thing.__qualname__)


def _structure(model: nn.Module) -> str:
    layers = [
        (name, type(module).__qualname__, module.extra_repr()) for name, module in model.named_modules()
    ]
    tensors = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return _digest(layers, tensors, trained, _code(type(model)))


def _weights(model: nn.Module) -> str:
    digest = sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(
            tensor.detach().cpu().double().numpy().tobytes()
            if tensor.is_floating_point()
            else tensor.detach().cpu().numpy().tobytes()
        )
    return digest.hexdigest()[:16]


def _contents(dataset: Dataset) -> str:
    parts: list[Records | None] = [dataset.train, dataset.test, dataset.validation]
    return _digest(*(None if records is None else contents(records) for records in parts))


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()[:16]
