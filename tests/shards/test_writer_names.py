"""What `from shards import …` gives, and that it costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys


def _run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True
    ).stdout


def test_importing_shards_imports_nothing_else() -> None:
    assert (
        _run("import sys, shards; print([m for m in sys.modules if m.startswith(('shards.', 'numpy'))])")
        == "[]\n"
    )


def test_convert_is_the_function_before_and_after_its_module_was_imported() -> None:
    program = "from shards import convert as a; from shards.convert import convert as b"
    program += "; from shards import convert as c"
    assert _run(f"{program}; print(a is b is c, callable(c))") == "True True\n"
    program = "import shards.convert; from shards import convert, ShardWriter, ShardReader, ShardBuilder"
    assert _run(f"{program}; print(convert.__name__, ShardWriter.__name__)") == "convert ShardWriter\n"


def test_the_format_needs_neither_pyarrow_nor_pillow_until_they_are_used() -> None:
    program = "import sys, shards.writer, shards.reader"
    program += "; print({'pyarrow', 'PIL', 'torch', 'fsspec'} & set(sys.modules))"
    assert _run(program) == "set()\n"
