"""Write docs/api.md, docs/messages.md and the tables of README.md: ``python docs/generate.py`` (``--check`` only compares).

``docs/torch-2.13.txt`` lists the public names of torch.distributed 2.13 with their parameters, and ``docs/torch-2.15.txt`` the
functions that torch 2.15 adds or changes; the names of mpicoll, its messages and its settings are read from the package itself.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mpicoll
from mpicoll import errors
from mpicoll.diagnosis.report import advice, report, texts
from mpicoll.launch import wrong_starts
from mpicoll.runtime.settings import SETTINGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Why a name of torch.distributed is not here. Everything else that is missing is "not yet".
NOT_APPLICABLE = {
    "AllToAllOptions": "options of torch's C++ backends",
    "AllreduceCoalescedOptions": "options of torch's C++ backends",
    "AllreduceOptions": "options of torch's C++ backends",
    "BarrierOptions": "options of torch's C++ backends",
    "BroadcastOptions": "options of torch's C++ backends",
    "GatherOptions": "options of torch's C++ backends",
    "ReduceOptions": "options of torch's C++ backends",
    "ReduceScatterOptions": "options of torch's C++ backends",
    "ScatterOptions": "options of torch's C++ backends",
    "BackendConfig": "there is one backend, MPI",
    "ProcessGroupGloo": "there is one backend, MPI; classes of other backends, such as ProcessGroupNCCL, are missing, too",
    "GroupName": "a type of torch's own annotations; names are `str`",
    "register_rendezvous_handler": "ranks find each other through MPI",
    "rendezvous": "ranks find each other through MPI",
    "record_comm": "names calls in torch's profiler",
    "shrink_group": "only for NCCL in torch; the remaining ranks call `new_group(ranks, use_local_synchronization=True)`",
}

NOTES = {
    "FileStore": "also `delete_key`, `num_keys`, queues",
    "HashStore": "also queues",
    "TCPStore": "also `secret=`: a process without the secret is refused. After `init_process_group` a store has a secret by "
    "default; a store that is made before needs a secret (any string that only the ranks know)",
    "GroupMember": "`WORLD` cannot be replaced by another group",
    "group": "`WORLD` cannot be replaced by another group",
    "init_device_mesh": "`mesh` is an array of NumPy; one backend, so `backend_override` has no effect",
    "DeviceMesh": "`mesh` is an array of NumPy; `with mesh:` does nothing",
    "Backend": "no other backend can be registered",
    "DebugLevel": "the check level in torch's words",
    "get_debug_level": "the check level: OFF, INFO for `roll`, DETAIL for `full`",
    "get_default_backend_for_device": "MPI for every supported device",
    "is_backend_available": "only MPI is available",
    "set_debug_level": "for the next `init_process_group`: existing groups have the level that their ranks agreed on",
    "set_debug_level_from_env": "as `set_debug_level`; without the variable `MPICOLL_CHECK` counts",
    "all_gather_into_tensor": "no FutureWarning",
    "reduce_scatter_tensor": "no FutureWarning",
    "monitored_barrier": "on every group; `err.ranks`, `err.calls`",
    "new_subgroups_by_enumeration": "ranks in two groups raise before any group is made",
    "split_group": "on groups of the host, too",
    "Work": "`get_future()` returns a `concurrent.futures.Future` with torch's `wait`, `value` and `then`; waits that only "
    "sleep (`concurrent.futures.wait`, asyncio) need `MPICOLL_PROGRESS=thread`, and "
    "`torch.futures.collect_all` does not accept the future; no `get_future_result`, `block_current_stream`, `boxed`, `unbox`",
    "ReduceOp": "AVG and PREMUL_SUM work on MPI",
    "ProcessGroup": "the calls are its methods, without `*Options`; no `abort`, `get_group_store`, `merge_remote_group`, "
    "`_start_coalescing`, `_end_coalescing`, `boxed`, `unbox`, nor `split_group` (`mpicoll.split_group` is)",
    "get_process_group_ranks": "KeyError outside the group (torch returns the ranks of another group)",
    "new_subgroups": "other ranks may divide other groups",
    "all_gather": "blocks may differ in size",
    "all_gather_coalesced": "returns a `Work` with `done`, `value` and `then` of its Future; lists that differ raise; "
    "no FutureWarning",
    "all_reduce_coalesced": "returns a `Work` with `done`, `value` and `then` of its Future; lists that differ raise; "
    "no FutureWarning",
    "destroy_process_group": "does not wait for other ranks (at most a second for ranks that share a GPU's memory); raises if a "
    "`Work` was not waited for",
    "get_node_local_rank": "from MPI after `init_process_group`",
    "init_process_group": "also `comm=`, `on_failure=`, `check=`; `enable_reconfigure` can only be False; "
    "other backends are accepted with one warning",
    "get_backend_impl": "returns the group",
    "send_object_list": "`weights_only` counts where the objects are received",
    "new_group": "inherits the world's limit; `use_local_synchronization` works",
    "irecv": "a message that is too long is not lost",
    "recv_object_list": "without `src=` receives a message from any rank",
    "recv": "a message that is too long is not lost",
}


OUTSIDE = {
    "torch.distributed.nn.functional._all_gather_base": "private; `all_gather` has the gradient",
    "torch.distributed._functional_collectives": "private, and for tracing by `torch.compile`, which does not trace the calls of "
    "this package; `mpicoll.nn.functional` has calls out of place, with gradients",
    "torch.distributed._coalescing_manager": "private: collects the launches of one backend's kernels; "
    "`all_reduce_coalesced`, `all_gather_coalesced` and `average_gradients` move many arrays in one call",
    "torch.distributed.Reducer": "of `DistributedDataParallel`, in C++; so are `GradBucket`, `Logger` and `BuiltinCommHookType`. "
    "They run on the backend `mpicoll.torch`: [torch.md](torch.md)",
    "torch.distributed.distributed_c10d": "`mpicoll.distributed_c10d` has the same names; `mpicoll.device_mesh` has those of "
    "`torch.distributed.device_mesh`",
    "torch.distributed.remote_device": "of `torch.distributed.rpc`, a library with connections of its own; so are "
    "`autograd` and `rpc`",
    "torch.distributed.RankType": "a type of torch's own annotations; ranks are `int`",
    "torch.distributed.algorithms": "models and hooks for `DistributedDataParallel`; `utils`, `config`, `constants`, "
    "`c10d_logger` and `logging_handlers` are internals of torch, too",
}
"""Why private or indirect names of torch.distributed that programs use are not here."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    parameters: str
    status: str
    note: str


def torch_names() -> dict[str, str | None]:
    """Return the public names of torch.distributed, each with its parameters (None for other names than functions)."""
    return dict(sorted((_names_of("2.13") | _names_of("2.15")).items()))


@cache
def _names_of(version: str) -> dict[str, str | None]:
    names: dict[str, str | None] = {}
    for line in (HERE / f"torch-{version}.txt").read_text().splitlines():
        match = re.fullmatch(r"(\w+)\((.*)\)", line)
        if match:
            names[match[1]] = match[2]
        else:
            names[line.removeprefix("class ")] = None
    return names


def newer(name: str) -> str:
    """Return a note of what torch 2.15 added to a name: the name itself, or parameters."""
    before, now = _names_of("2.13"), _names_of("2.15")
    if name not in now:
        return ""
    if name not in before:
        return "of torch 2.15"
    added = [
        word.split("=")[0] for word in (now[name] or "").split(", ") if word not in (before[name] or "").split(", ")
    ]
    return f"{', '.join(f'`{word}=`' for word in added)} of torch 2.15"


def parameters(function: Any) -> list[str]:
    """Return a function's parameters as ``name`` or ``name=default``; ``*`` starts the keyword-only ones."""
    words: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        default = parameter.default
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        words.append(stars + parameter.name if default is parameter.empty else f"{parameter.name}={_text(default)}")
    return words


def _text(default: Any) -> str:
    if isinstance(default, tuple):
        return f"({', '.join(getattr(each, 'name', None) or repr(each) for each in default)})"
    return str(default) if str(default).startswith("ReduceOp.") else repr(default)


def rows() -> list[Row]:
    """Return the table: every public name of torch.distributed, with its status in mpicoll."""
    table = []
    for name, theirs in torch_names().items():
        if name in mpicoll.__all__:
            ours = getattr(mpicoll, name)
            words = parameters(ours) if inspect.isfunction(ours) else []
            extras = [word.split("=")[0] for word in words[words.index("*") + 1 :]] if "*" in words else []
            note = NOTES.get(name, "")
            if extras and "also" not in note:
                note = "; ".join(filter(None, [note, "also " + ", ".join(f"`{extra}=`" for extra in extras)]))
            status = "extended" if extras or note else "same"
            table.append(Row(name, theirs or "", status, "; ".join(filter(None, [newer(name), note]))))
        elif name in NOT_APPLICABLE:
            table.append(Row(name, theirs or "", "not applicable", NOT_APPLICABLE[name]))
        else:
            table.append(Row(name, theirs or "", "not yet", ""))
    return table


def own_names() -> list[str]:
    """Return the public names that torch.distributed does not have."""
    return [name for name in mpicoll.__all__ if name not in torch_names() and name != "__version__"]


def functional_rows() -> list[tuple[str, str]]:
    """Return the calls of mpicoll.nn.functional, each with its first line; importing the module would import torch."""
    tree = ast.parse((ROOT / "mpicoll" / "torch" / "functional.py").read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = node.args
            bare = len(arguments.args) - len(arguments.defaults)
            words = [each.arg for each in arguments.args]
            words[bare:] = [
                f"{word}={ast.unparse(default)}" for word, default in zip(words[bare:], arguments.defaults, strict=True)
            ]
            found.append((f"{node.name}({', '.join(words)})", (ast.get_docstring(node) or "").splitlines()[0]))
    return sorted(found)


def api_page() -> str:
    """Return docs/api.md."""
    lines = [
        "# mpicoll beside torch.distributed 2.13 and 2.15",
        "",
        "Generated from the code by `python docs/generate.py`; a test fails when it is out of date.",
        "*same*: name, parameters, defaults and meaning; *extended*: more parameters or features, or safer than torch.",
        "",
        "| torch.distributed | | remarks |",
        "|---|---|---|",
    ]
    for row in rows():
        call = f"`{row.name}({row.parameters})`" if row.parameters else f"`{row.name}`"
        lines.append(f"| {call} | {row.status} | {row.note} |")
    lines += [
        "",
        "## Differentiable collectives",
        "",
        "`from mpicoll.nn import functional` has what `torch.distributed.nn.functional` has, with the same parameters.",
        "Second derivatives work; a rank outside the group gets a ValueError (torch warns and returns uninitialised memory).",
        "",
        "| torch.distributed.nn.functional | what it returns |",
        "|---|---|",
        *(f"| `{call}` | {first.replace('``', '`')} |" for call, first in functional_rows()),
        "",
        "| not here | why |",
        "|---|---|",
        *(f"| `{name}` | {why} |" for name, why in OUTSIDE.items()),
    ]
    lines += ["", "## Only here", "", "| name | what it is |", "|---|---|"]
    for name in own_names():
        first = (inspect.getdoc(getattr(mpicoll, name)) or "").splitlines()[0]
        lines.append(f"| `{name}` | {first} |")
    lines += ["", "## Functions", ""]
    for name in mpicoll.__all__:
        value = getattr(mpicoll, name)
        if inspect.isfunction(value):
            lines += [f"### `{name}({', '.join(parameters(value))})`", "", *_plain(inspect.getdoc(value) or ""), ""]
    return "\n".join(lines).rstrip() + "\n"


def messages_page() -> str:
    """Return docs/messages.md."""
    classes = [
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.DistError)
    ]
    return "\n".join(
        [
            "# Messages",
            "",
            "Generated from the code by `python docs/generate.py`; a test fails when it is out of date.",
            "Names in braces stand for facts: ranks, calls with their file:line, groups, times. Errors about arguments stand",
            "under *Raises* of each function. [order-checks.md](order-checks.md) shows whole reports.",
            "",
            "## Errors",
            "",
            "Errors between ranks have these classes of `mpicoll.errors`.",
            "",
            "| class | when it is raised | what to do |",
            "|---|---|---|",
            *(f"| `{each.__name__}` | {_cell(each.__doc__ or '')} | {_cell(each.what_to_do)} |" for each in classes),
            "",
            "## Reports",
            "",
            "A report has a headline, a row for each different state of the ranks, a line `next:`, and the state of the group.",
            "",
            *_messages(texts, "headline or last line"),
            "",
            "A row begins with its ranks and says what these ranks do:",
            "",
            *_messages(report, "row"),
            "",
            "The line `next:` says what to do:",
            "",
            *_messages(advice, "next"),
            "",
            "## Wrong starts",
            "",
            "A start that cannot work raises LaunchError in every process, before MPI would hang or abort.",
            "",
            *_messages(wrong_starts, "message"),
            "",
        ]
    )


def _messages(module: ModuleType, title: str) -> list[str]:
    """Return the table of the messages that are attributes of a module."""
    found = [value for value in vars(module).values() if isinstance(value, errors.Message)]
    columns = 2 + any(message.what_to_do for message in found)
    lines = [f"| {title} | when | what to do |", "|---|---|---|"]
    for message in found:
        text = re.sub(r"\{\w+:([^/}]*)/[^}]*\}", r"\1", message.text)  # the form of one rank
        lines.append(f"| {_cell(text)} | {_cell(message.when)} | {_cell(message.what_to_do)} |")
    return lines if columns == 3 else [line.rsplit("|", 2)[0] + "|" for line in lines]


def _cell(text: str) -> str:
    """Return a text for a cell of a table: the first paragraph, in one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.replace("``", "`").replace("|", r"\|").replace("<", r"\<")


def _plain(text: str) -> list[str]:
    return ["```text", *text.replace("``", "").splitlines(), "```"]


def readme_table() -> str:
    """Return the API table of the README: short, by status."""
    by_status: dict[str, list[str]] = {}
    for row in rows():
        by_status.setdefault(row.status, []).append(f"`{row.name}`")
    lines = ["| against torch.distributed 2.13 and 2.15 | names |", "|---|---|"]
    for status in ("same", "extended", "not yet", "not applicable"):
        if by_status.get(status):
            lines.append(f"| {status} | {', '.join(by_status[status])} |")
    lines.append(f"| only here | {', '.join(f'`{name}`' for name in own_names())} |")
    return "\n".join(lines)


def settings_table() -> str:
    """Return the table of settings."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        default = (
            f"{setting.default:g}"
            if isinstance(setting.default, float)
            else (setting.default if isinstance(setting.default, str) else str(int(setting.default)))
        )
        lines.append(f"| `{setting.variable}` | {setting.values} | {default} | {setting.meaning} |")
    return "\n".join(lines)


def readme() -> str:
    """Return README.md with its generated parts renewed."""
    text = (ROOT / "README.md").read_text()
    for name, part in (("api", readme_table()), ("settings", settings_table())):
        pattern = re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, part=part: match[1] + part + "\n" + match[2], text)
        if count != 1:
            raise SystemExit(f"README.md must have one part <!-- {name}: generated --> … <!-- end -->")
    return text


def main() -> int:
    """Write the files, or with ``--check`` print which of them are out of date."""
    stale = []
    pages = ((HERE / "api.md", api_page()), (HERE / "messages.md", messages_page()), (ROOT / "README.md", readme()))
    for path, text in pages:
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
