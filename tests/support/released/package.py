"""How `import` finds released modules, and what stands in for the rest of their packages.

Of a package only the modules a release names are there, from their files. A program gives some
others what its adapter uses of them. All else is hollow: any name can be imported from it and
stand in an annotation or as a base class, but whoever calls it, or asks whether it is true,
gets NotThere, which names it. So an adapter cannot run through something that is not there
without this being said.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class NotThere(Exception):
    """A released module used something that neither is there nor has a stand-in."""


class _HollowType(type):
    """Of classes that stand for names nobody uses."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_hollow" in vars(cls):
            raise NotThere(f"{cls.__qualname__} was called")
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(f"{cls.__qualname__}.{name}")

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        raise NotThere(f"{cls.__qualname__} was iterated over")

    def __bool__(cls) -> bool:
        if "_is_hollow" in vars(cls):
            raise NotThere(f"{cls.__qualname__} was asked whether it is true")
        return True


def hollow(name: str) -> Any:
    """A class to annotate with and to derive from, not to use."""
    return _HollowType(name, (), {"_is_hollow": True, "__qualname__": name})


class _StandIn(ModuleType):
    """A module with some names given; the others are hollow."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        finder = sys.modules[__name__]._finder
        if finder is not None and finder.knows(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        return hollow(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._given: dict[str, Mapping[str, Any]] = {}
        self._packages: set[str] = set()

    def add(
        self, package: str, files: Mapping[str, Path], given: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._packages.add(package)
        self._files.update(files)
        self._given.update(given)
        self._packages.update(name.partition(".")[0] for name in given)

    def knows(self, name: str) -> bool:
        """Whether it is a module that is there or given, or a package around one."""
        names = (*self._files, *self._given)
        return any(known == name or known.startswith(f"{name}.") for known in names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        file = self._files.get(fullname)
        if file is not None:
            places = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                fullname, file, submodule_search_locations=places
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


_finder: _Finder | None = None


def install(
    package: str, files: Mapping[str, Path], given: Mapping[str, Mapping[str, Any]]
) -> None:
    """Make ``package`` importable: ``files`` by module name, ``given`` names of stand-ins.

    What another program of the same package has imported goes first.
    """
    global _finder
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    if _finder is None:
        _finder = _Finder()
        sys.meta_path.insert(0, _finder)
    _finder.add(package, files, given)


def released(name: str) -> Any:
    """A released module."""
    return importlib.import_module(name)
