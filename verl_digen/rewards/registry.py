"""Functions by name, one per file of a folder."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Registry:
    """Functions of one kind by name. Every module of ``package`` is imported when one is first asked for.

    Args:
        kind: what they are, for messages.
        package: name of the package whose modules register them.
    """

    def __init__(self, kind: str, package: str):
        self.kind, self.package = kind, package
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: make a function known under ``name``.

        Raises:
            ValueError: another function has that name.
        """

        def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
            known = self._functions.get(name)
            if known is not None and _place(known) != _place(function):
                raise ValueError(f"{self.kind} {name!r} is taken by {'.'.join(_place(known))}")
            self._functions[name] = function
            return function

        return decorator

    def available(self) -> list[str]:
        """Names of all registered functions."""
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__, f"{self.package}."):
            importlib.import_module(module.name)
        return sorted(self._functions)

    def get(self, name: str) -> Callable[..., Any]:
        """The function called ``name``.

        Raises:
            ValueError: there is none; the message lists those there are.
        """
        names = self.available()
        if name not in self._functions:
            raise ValueError(f"unknown {self.kind} {name!r}; available: {', '.join(names)}")
        return self._functions[name]

    def load(self, label: str, path: str | None, name: str | None, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of an entry of the configuration: a registered one, or one of a file.

        Args:
            label: the entry's own name; the function's too, unless ``name`` says another.
            path: file of a function of one's own; None takes a registered one.
            kwargs: bound to the function.

        Raises:
            ValueError: no such registered function, file, or function in the file.
        """
        name = name or label
        if path is None:
            function = self.get(name)
        else:
            from verl.utils.import_utils import load_extern_object

            if not Path(path).is_file():
                raise ValueError(f"{self.kind} {label!r}: no file {path}")
            try:
                function = load_extern_object(module_path=path, object_name=name)
            except AttributeError as error:
                raise ValueError(f"{self.kind} {label!r}: {path} has no function {name!r}") from error
            except SystemExit as error:
                raise ValueError(f"{self.kind} {label!r}: {path} calls sys.exit when it is imported") from error
        return functools.partial(function, **kwargs) if kwargs else function


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__
