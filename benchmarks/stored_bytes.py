# SPDX-License-Identifier: Apache-2.0
"""What a store takes, what a second machine adds, and what idle pushes and pulls touch.

    python benchmarks/stored_bytes.py [--quick] [--out FILE] [--model tx4] [--next tx5]

Counted against Mega-Cache's blob: the stored blobs of the kinds that such a blob can hold, and of the
other objects of the store (segment, environment document) the share that these entries have in the
number of records. The C++ kernels, which Mega-Cache leaves out, are told apart. The second machine is a
process of another user with another home, cache path, hash seed and key, that compiles for itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import harness

PROGRAM = Path(__file__).with_name("first_call.py")
WORKLOAD = harness.WORKLOAD
MEGA_KINDS = frozenset({"inductor", "aot_autograd", "autotune", "pgo", "precompile"})


class Place:
    """One store and the machines that use it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = root / "store"

    def machine(self, name: str, seed: str) -> dict[str, str]:
        """A user's environment."""
        home = self.root / "homes" / name
        cache = home / "cache" / ("of" * len(name)) / "inductor"
        return harness.user_environment(home, name, TORCHINDUCTOR_CACHE_DIR=str(cache), PYTHONHASHSEED=seed)

    def config(self, name: str) -> Path:
        """A key of the machine's own, and a policy that trusts all of them."""
        from torchrelay.signing import trust

        own = self.root / "config" / name
        own.parent.mkdir(mode=0o700, exist_ok=True)
        trust.first_use(own)
        policies = [folder / "trust.toml" for folder in own.parent.iterdir()]
        keys = [key for path in policies for key in trust.load_policy(path).keys]
        for path in policies:
            for key in keys:
                trust.update_policy(path, partial(_with_key, key=key))
        return own

    def compile(self, name: str, model: str, *options: str | Path, seed: str = "1") -> dict[str, Any]:
        """Compile ``model`` on a machine of its own and push; what the push added to the store."""
        before = self.blobs()
        fixed = ["--model", model, "--store", self.store, "--config", self.config(name), "--push"]
        found: dict[str, Any] = harness.fresh([PROGRAM, *fixed, *options], self.machine(name, seed))
        new = {blob: size for blob, size in self.blobs().items() if blob not in before}
        harness.note(f"{name}: {model}: {len(new)} new blobs")
        return found | {"new_blobs": len(new), "new_blob_bytes": sum(new.values())}

    def blobs(self) -> dict[str, int]:
        """Stored sizes by name."""
        found = (path for path in (self.store / "blobs").rglob("*") if path.is_file())
        return {path.name: path.stat().st_size for path in found}

    def idle(self, name: str, what: str) -> dict[str, Any]:
        """An idle ``push`` or ``pull`` on a machine; what it asked for and opened."""
        arguments = [__file__, "--idle", what, self.store, self.config(name)]
        found: dict[str, Any] = harness.fresh(arguments, self.machine(name, "2"))
        return found


def _with_key(policy: Any, key: Any) -> Any:
    return policy.with_key(key)


# -- an idle push or pull, watched -------------------------------------------------------------------


class Opened:
    """Files and folders below a directory that this process opens, torchrelay's own state apart."""

    def __init__(self, below: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._below = str(below.resolve())
        self._open = os.open
        os.open = self._watched
        sys.addaudithook(self._audited)

    def _watched(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        descriptor = self._open(path, flags, *rest, **named)
        self._count(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return descriptor

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        # A mode stands here only for `open()`; `os.open` is counted above, with the folder it is in.
        if event == "open" and args[1] is not None and isinstance(args[0], str):
            self._count(os.path.realpath(args[0]))

    def _count(self, path: str) -> None:
        if path.startswith(self._below):
            own = "/.torchrelay" in path.removeprefix(self._below)
            sort = "folder" if Path(path).is_dir() else "file"
            self.counts[f"own {sort}" if own else sort] += 1


def watch_backend(counts: Counter[str]) -> None:
    """Count the calls and names that reach the store."""
    from torchrelay import workplace
    from torchrelay.storage.wrapper import WrapperBackend

    class Counting(WrapperBackend):
        def _put_many(self, objects: Any) -> Any:
            counts["put"] += len(objects)
            return super()._put_many(objects)

        def _get_many(self, gets: Any) -> Any:
            counts["get"] += len(gets)
            return super()._get_many(gets)

        def _stat_many(self, names: Any) -> Any:
            counts["stat"] += len(names)
            return super()._stat_many(names)

        def _list_page(self, prefix: str, token: str) -> Any:
            counts[f"list {prefix.split('/', maxsplit=1)[0]}/"] += 1
            return super()._list_page(prefix, token)

    open_backend = workplace.open_backend
    workplace.open_backend = lambda *args, **named: Counting(open_backend(*args, **named))


def idle(what: str, store: Path, config: Path) -> dict[str, Any]:
    """Do it in this process."""
    import torch._inductor.codecache  # noqa: F401 - before anything is counted

    from torchrelay import Relay
    from torchrelay.options import PullOptions, PushOptions

    requests: Counter[str] = Counter()
    watch_backend(requests)
    relay = Relay(
        store,
        workload=WORKLOAD,
        key=config / "key.pem",
        policy=config / "trust.toml",
        strict=True,
        in_process=False,
    )
    opened = Opened(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    report: Any = relay.push(PushOptions(all=True)) if what == "push" else relay.pull(PullOptions())
    idle_is = report.pushed == 0 if what == "push" else report.installed == 0
    return {"idle": idle_is, "requests": dict(requests), "opened": dict(opened.counts)}


# -- the whole ---------------------------------------------------------------------------------------


def stored(place: Place, mega: Path) -> dict[str, Any]:
    """What the store holds for what the Mega-Cache blob holds."""
    from torchrelay import Relay

    relay = Relay(
        place.store,
        workload=WORKLOAD,
        policy=place.config("first") / "trust.toml",
        state_dir=place.root / "state",
        strict=True,
    )
    entries = relay.entries().entries
    held = [entry for entry in entries if entry.kind in MEGA_KINDS]
    objects = [path for path in place.store.rglob("*") if path.is_file()]
    others = sum(
        path.stat().st_size for path in objects if "blobs" not in path.relative_to(place.store).parts
    )
    blobs = {entry.blob: entry.stored_size for entry in held}
    share = others * len(held) / len(entries)
    return {
        "mega_bytes": mega.stat().st_size,
        "mega_kinds": dict(Counter(entry.kind for entry in held)),
        "mega_kinds_plain_bytes": sum(entry.size for entry in held),
        "mega_kinds_blob_bytes": sum(blobs.values()),
        "mega_kinds_share_of_other_objects": round(share),
        "other_kinds": dict(Counter(entry.kind for entry in entries if entry.kind not in MEGA_KINDS)),
        "other_kinds_blob_bytes": sum(e.stored_size for e in entries if e.kind not in MEGA_KINDS),
        "other_objects_bytes": others,
        "ratio": (sum(blobs.values()) + share) / mega.stat().st_size,
    }


def measure(root: Path, model: str, bigger: str) -> dict[str, Any]:
    """Everything, in order."""
    place, mega = Place(root), root / "mega.bin"
    first = place.compile("first", model, "--save-mega", mega)
    found: dict[str, Any] = {"model": model, "first": first, "stored": stored(place, mega)}
    found["idle push"] = [place.idle("first", "push") for _ in range(2)][-1]
    found["second"] = place.compile("the-second-machine", model, seed="2")
    # A machine that compiled it itself and pulls, and pulls again.
    found["idle pull"] = [place.idle("the-second-machine", "pull") for _ in range(2)][-1]
    found["bigger"] = place.compile("third", bigger, seed="3")
    return found


def show(found: dict[str, Any], bigger: str) -> list[dict[str, Any]]:
    """Print the tables; the targets."""
    sizes = found["stored"]
    rows = [
        ("Mega-Cache blob", sizes["mega_bytes"], 1.0),
        ("the same entries, canonical, plain", sizes["mega_kinds_plain_bytes"], ""),
        ("the same entries, stored blobs", sizes["mega_kinds_blob_bytes"], ""),
        ("their share of segment and environment", sizes["mega_kinds_share_of_other_objects"], ""),
        (
            "together",
            sizes["mega_kinds_blob_bytes"] + sizes["mega_kinds_share_of_other_objects"],
            sizes["ratio"],
        ),
        ("kernels, which the blob lacks, stored", sizes["other_kinds_blob_bytes"], ""),
    ]
    harness.table(f"{found['model']}: bytes", ("what", "bytes", "x Mega-Cache"), rows)
    print(f"\nkinds: {sizes['mega_kinds']}; beside them {sizes['other_kinds']}")
    pushes = [
        (name, p["pushed"], p["held"], p["covered"], p["new_blobs"], p["new_blob_bytes"], p["uploaded_bytes"])
        for name, p in (
            ("first machine", found["first"]),
            ("second machine, same compile", found["second"]),
            (f"third machine, {bigger}", found["bigger"]),
        )
    ]
    columns = ("push", "recorded", "held", "covered", "new blobs", "their bytes", "all bytes uploaded")
    harness.table("Pushes into one store", columns, pushes)
    quiet = [(name, found[name]["idle"], found[name]["requests"], found[name]["opened"]) for name in _IDLE]
    harness.table("Idle", ("what", "idle", "requests", "opened below the cache directory"), quiet)
    read = sum(found[name]["opened"].get("file", 0) for name in _IDLE)
    return [
        harness.target("stored bytes / Mega-Cache blob", sizes["ratio"], round(1 / 9, 4)),
        harness.target("blob bytes from a second machine", found["second"]["new_blob_bytes"], 0),
        harness.target("cache files opened by idle push and pull", read, 0),
        harness.target("requests of an idle push beside listings", _asked(found["idle push"]), 2),
        harness.target("requests of an idle pull beside listings", _asked(found["idle pull"]), 0),
    ]


_IDLE = ("idle push", "idle pull")


def _asked(found: dict[str, Any]) -> int:
    return sum(count for name, count in found["requests"].items() if not name.startswith("list"))


def main() -> int:
    """Measure, print, write."""
    if len(sys.argv) > 1 and sys.argv[1] == "--idle":
        print(json.dumps(idle(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
        return 0
    asked = harness.arguments(
        __doc__, rounds=1, model=("tx4", "the model"), next=("tx5", "the one with a layer more")
    )
    model, bigger = ("tx1", "tx2") if asked.quick else (asked.model, asked.next)
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as root:
        found = measure(Path(root), model, bigger)
    return harness.finish("stored_bytes", found, show(found, bigger), asked.out)


if __name__ == "__main__":
    sys.exit(main())
