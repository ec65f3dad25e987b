"""``verl-digen doctor``: what is installed, what veRL will use, what is registered, what is missing and how to get it.

The exit status is 1 when veRL would not find something of this package (a registration or the entry point failed),
else 0; missing extras and assets are shown, and are no failure. ``--json`` writes the same as one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

SUPPORTED_VERL = ("0.9.1",)
REQUIRED = ("torch", "diffusers", "transformers", "verl", "ray", "TransferQueue", "peft", "hydra-core", "wrapt")
OPTIONAL = ("flash-attn", "vllm", "vllm-omni", "wandb", "tensorboard", "rapidocr")
DISTRIBUTION = "verl-digen"
EXTRA_OPTIONS = {"flash-attn": " --no-build-isolation"}  # flash-attn builds against the torch that is installed
ASSETS = Path(__file__).parents[1] / "models" / "assets" / "digits"

Report = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if report["ok"] else 1


def collect() -> Report:
    """Everything the doctor knows, as plain JSON types. Imports verl and all modules of the registrations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # veRL warns of each training backend that is not installed
        registrations = check_registrations()
        chosen = chosen_platform()
        devices = list_devices()
    entry_point = check_entry_point()
    return {
        "ok": entry_point == "ok" and all(row["status"] == "ok" for row in registrations),
        "versions": versions(),
        "verl_supported": version_of("verl") in SUPPORTED_VERL,
        "devices": devices,
        "platform": chosen,
        "entry_point": entry_point,
        "registrations": registrations,
        "extras": missing_extras(),
        "assets": check_assets(),
    }


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Distribution -> version, None if it is not installed; ``python`` and this package first."""
    names = (DISTRIBUTION, *REQUIRED, *OPTIONAL)
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


def check_entry_point() -> str:
    """``ok``, or why veRL does not load ``verl_digen.plugin`` by itself."""
    names = {entry.name for entry in metadata.entry_points(group="verl.plugins")}
    if "verl_digen" not in names:
        return "the entry point is not installed: run `pip install .` in the source tree"
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "verl_digen" not in {name.strip() for name in policy.split(",")}:
        return f"excluded by VERL_USE_EXTERNAL_PLUGINS={policy}: unset it or add verl_digen"
    return "ok"


def check_registrations() -> list[Report]:
    """Import each registry's module, then look the name up in it and import what it stands for."""
    from verl_digen import plugin

    rows = []
    for row in plugin.REGISTRATIONS:
        cause = None
        try:
            module = importlib.import_module(row.hook)
            entry = plugin.REGISTRIES[row.kind].find(module, row.name)
            if entry is None:
                raise plugin.failures.get(row.key) or LookupError(f"not in the registry of {row.hook}")
            if not plugin.ours(entry):
                raise LookupError(f"the name is taken by {entry.__module__}")
            row.load()
        except Exception as error:  # noqa: BLE001 - the doctor reports whatever is wrong, and goes on
            cause = f"{type(error).__name__}: {error}"
        status = "ok" if cause is None else "failed"
        rows.append({"kind": row.kind, "name": row.name, "target": row.target, "status": status, "cause": cause})
    return rows


def chosen_platform() -> Report:
    """The platform veRL has chosen in this process and what asked for it."""
    asked = os.environ.get("VERL_PLATFORM") or None
    try:
        from verl.plugin.platform import get_platform

        chosen = get_platform()
    except Exception as error:  # noqa: BLE001 - a broken or missing veRL is a finding, not a crash of the doctor
        return {"VERL_PLATFORM": asked, "error": f"{type(error).__name__}: {error}"}
    return {
        "VERL_PLATFORM": asked,
        "device": chosen.device_name,
        "vendor": chosen.vendor_name,
        "available": chosen.is_available(),
        "backend": chosen.communication_backend_name(),
        "ray_resource": chosen.ray_resource_name(),
    }


def list_devices() -> list[Report]:
    """The CPU and each visible accelerator: name, memory in GiB, and cores (CPU)."""
    try:
        import torch
    except ImportError:
        return []
    from verl_digen.platform import cpu_device

    cpu = cpu_device.get_device_properties()
    devices = [
        {"device": "cpu", "name": cpu.name, "memory_gib": _gib(cpu.total_memory), "cores": cpu.multi_processor_count}
    ]
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        for index in range(module.device_count() if module is not None and module.is_available() else 0):
            properties = module.get_device_properties(index)
            devices.append(
                {"device": f"{kind}:{index}", "name": properties.name, "memory_gib": _gib(properties.total_memory)}
            )
    return devices


def missing_extras() -> list[Report]:
    """Each extra of this package: what it still lacks ([] if complete) and the command that installs it."""
    from packaging.requirements import Requirement

    try:
        about = metadata.metadata(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(text) for text in about.get_all("Requires-Dist") or []]
    extras = []
    for extra in about.get_all("Provides-Extra") or []:
        wanted = [
            r for r in requirements if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate()
        ]
        lacking = []
        for requirement in wanted:
            installed = version_of(requirement.name)
            if installed is None:
                lacking.append(f"{requirement.name}{requirement.specifier}")
            elif not requirement.specifier.contains(installed, prereleases=True):
                lacking.append(f"{requirement.name}{requirement.specifier} ({installed} is installed)")
        command = f"pip install '{DISTRIBUTION}[{extra}]'{EXTRA_OPTIONS.get(extra, '')}"
        extras.append({"extra": extra, "missing": lacking, "command": command if lacking else None})
    return extras


def check_assets() -> Report:
    """Whether the digits model that the package ships is there."""
    files = sorted(path for path in ASSETS.rglob("*") if path.is_file()) if ASSETS.is_dir() else []
    weights = any(path.suffix == ".safetensors" for path in files)
    return {
        "path": str(ASSETS),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "present": weights,
        "command": None if weights else "verl-digen prepare digits-weights",
    }


def show(report: Report) -> None:
    """Write the report as tables."""
    from rich.console import Console

    console = Console()
    for table in _tables(report):
        console.print(table)
    good = [row for row in report["registrations"] if row["status"] == "ok"]
    verdict = "all is well" if report["ok"] else "veRL would not find all of verl_digen"
    console.print(f"{len(good)} of {len(report['registrations'])} registrations in place: {verdict}")


def _tables(report: Report) -> list[Any]:
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title, title_justify="left")
        for column in columns:
            made.add_column(column, overflow="fold")
        return made

    versions_table = table("versions", "package", "version", "note")
    for name, version in report["versions"].items():
        note = "" if version or name in OPTIONAL else "[red]required, not installed[/red]"
        if name == "verl" and version and not report["verl_supported"]:
            note = f"[red]not supported; this plugin is for {', '.join(SUPPORTED_VERL)}[/red]"
        versions_table.add_row(name, version or "-", "optional" if name in OPTIONAL and not version else note)

    devices = table("devices", "device", "name", "memory", "cores")
    for device in report["devices"]:
        cores = str(device.get("cores", ""))
        devices.add_row(device["device"], device["name"], f"{device['memory_gib']:.1f} GiB", cores)

    chosen = table("platform chosen by veRL", "what", "value")
    for key, value in report["platform"].items():
        chosen.add_row(key, "not set" if value is None else _text(str(value)))

    registrations = table("registered with veRL", "kind", "name", "status", "target or cause")
    entry_point = report["entry_point"]
    registrations.add_row("entry point", "verl_digen", *_status(entry_point == "ok", "verl_digen.plugin", entry_point))
    for row in report["registrations"]:
        registrations.add_row(row["kind"], row["name"], *_status(row["status"] == "ok", row["target"], row["cause"]))

    extras = table("extras", "extra", "missing", "how to get it")
    for row in report["extras"]:
        extras.add_row(
            row["extra"], ", ".join(row["missing"]) or "[green]complete[/green]", _text(row["command"] or "")
        )

    assets = table("shipped assets", "what", "status", "path or command")
    found = report["assets"]
    size = f"{found['files']} files, {found['bytes'] / 2**20:.1f} MiB"
    assets.add_row(
        "digits model", size if found["present"] else "[red]missing[/red]", found["command"] or found["path"]
    )
    return [versions_table, devices, chosen, registrations, extras, assets]


def _status(ok: bool, target: str, cause: str | None) -> tuple[str, str]:
    return ("[green]ok[/green]", target) if ok else ("[red]failed[/red]", _text(str(cause)))


def _text(plain: str) -> str:
    """Square brackets of an error or a pip command are text, not rich markup."""
    from rich.markup import escape

    return escape(plain)


def _gib(size: int) -> float:
    return round(size / 2**30, 2)
