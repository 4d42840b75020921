"""Machine code of emitted functions, compiled by LLVM and kept on disk for all processes.

An object file is kept under a checksum of its LLVM code, the processor and the compiler's version,
so a changed kernel is compiled again and an old one is never found. Machine code in memory is never
freed: XLA or a thread may call it at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding, ir

from flexgen_jax.caches import cache_folder
from flexgen_jax.cpu.processor import Processor, host

DIGEST_BYTES = 32

MAX_OBJECT_FILES = 1000
"""Object files in the cache; the oldest ones are removed beyond that."""

LOCK = threading.Lock()
"""LLVM's linker is used by one thread at a time."""

LIBRARIES: list[Library] = []
"""All linked modules, which keeps their code."""


class Library:
    """A module's functions in this process."""

    def __init__(self, name: str, code: bytes, exported: tuple[str, ...]) -> None:
        builder = binding.JITLibraryBuilder().add_object_img(code).add_current_process()
        for symbol in exported:
            builder.export_symbol(symbol)
        self._tracker = builder.link(_linker(), name)

    def address(self, name: str) -> int:
        return int(self._tracker[name])

    def function(self, name: str, *parameters: Any, result: Any = None) -> Any:
        """Returns a function for Python, which holds no lock of the interpreter."""
        return ctypes.CFUNCTYPE(result, *parameters)(self.address(name))


def compiled(module: ir.Module) -> Library:
    """Compiles a module for this processor, or loads its object file, and links it."""
    exported = tuple(
        name
        for name, value in module.globals.items()
        if value.linkage != "internal" and not getattr(value, "is_declaration", False)
    )
    code = object_code(module, host())
    with LOCK:
        library = Library(f"{module.name}.{len(LIBRARIES)}", code, exported)
        LIBRARIES.append(library)
    return library


def object_code(module: ir.Module, processor: Processor) -> bytes:
    """Returns a module's object file, from the cache where it is there."""
    known = repr((str(module), processor, llvmlite.__version__)).encode()
    path = cache_folder("kernels") / f"{module.name}.{hashlib.sha256(known).hexdigest()[:32]}.o"
    if (code := _kept_code(path)) is None:
        machine = _target_machine(processor)
        code = machine.emit_object(optimized(module, machine))
        with suppress(OSError):  # neither a full disk nor a missing folder is an error
            _keep_code(path, code)
    return code


def optimized(module: ir.Module, machine: Any) -> Any:
    """Returns a module after LLVM's passes. Loops stay as they were emitted."""
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    options = binding.PipelineTuningOptions(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed


def assembly(module: ir.Module, processor: Processor) -> str:
    """Returns a module's instructions in the assembly language of a processor."""
    machine = _target_machine(processor)
    return str(machine.emit_assembly(optimized(module, machine)))


@lru_cache
def _target_machine(processor: Processor) -> Any:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(processor.triple or binding.get_process_triple())
    # The linker may place code far from its constants and from the C library.
    is_mac = "darwin" in target.triple
    model = {"reloc": "pic"} if is_mac else {"reloc": "static", "codemodel": "large"}
    return target.create_target_machine(
        cpu=processor.name, features=processor.options, opt=3, **model
    )


@lru_cache
def _linker() -> Any:
    return binding.create_lljit_compiler(_target_machine(host()))


def _kept_code(path: Path) -> bytes | None:
    """Reads an object file; None if it is missing or damaged."""
    with suppress(OSError):
        content = path.read_bytes()
        digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    return None


def _keep_code(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(hashlib.sha256(code).digest() + code)
    temporary.replace(path)
    by_age = sorted(path.parent.glob("*.o"), key=lambda file: file.stat().st_mtime)
    for file in by_age[: max(0, len(by_age) - MAX_OBJECT_FILES)]:
        file.unlink(missing_ok=True)
