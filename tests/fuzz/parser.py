"""What a parser is for the fuzzer, and how hostile input for it is made."""

import dataclasses
import json
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ballast_policies.contract.errors import ContractError

from tests.contract.examples import EXAMPLES
from tests.fuzz.mutation import Choose, as_json, mutated


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """One parser.

    Attributes:
        name: for the command line and the tests.
        make: hostile input, from choices.
        read: reads it.
        errors: what it raises on purpose; anything else is a finding.
    """

    name: str
    make: Callable[[Choose], Any]
    read: Callable[[Any], object]
    errors: tuple[type[Exception], ...] = ()


def document(example: Any) -> Callable[[Choose], Any]:
    return lambda choose: mutated(example, choose)


def text(example: Any) -> Callable[[Choose], str]:
    return lambda choose: as_json(mutated(example, choose), choose)


def object_with(example: Mapping[str, Any], field: str) -> Callable[[Choose], dict[str, Any]]:
    """A Kubernetes object of which one field is hostile."""
    return lambda choose: {**example, field: mutated(example[field], choose)}


def compressed(example: Any) -> Callable[[Choose], bytes]:
    """A saved state; one time in sixteen it was cut off."""

    def make(choose: Choose) -> bytes:
        content = zlib.compress(as_json(mutated(example, choose), choose).encode(errors="replace"))
        return content[: choose(len(content))] if choose(16) == 0 else content

    return make


def message(name: str, kind: Any) -> Parser:
    example = json.loads(EXAMPLES[name].to_json())
    return Parser(name=name, make=text(example), read=kind.from_json, errors=(ContractError,))


def joined(parts: list[str], separator: str) -> Callable[[Choose], str]:
    def make(choose: Choose) -> str:
        found = mutated(parts, choose)
        return separator.join(map(str, found)) if isinstance(found, list) else str(found)

    return make


def lines(rows: list[list[str]], separator: str) -> Callable[[Choose], str]:
    """Lines of columns; some of them hostile."""

    def make(choose: Choose) -> str:
        found = mutated(rows, choose)
        return "\n".join(
            separator.join(map(str, row)) if isinstance(row, list) else str(row)
            for row in (found if isinstance(found, list) else [found])
        )

    return make


def read_file(read: Callable[[Path], object]) -> Callable[[str], object]:
    def parse(text: str) -> object:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            return read(Path(file.name))

    return parse


def attempt(parser: Parser, choose: Choose) -> None:
    """Make an input and read it; whatever is raised is a finding, with the input as a note."""
    given = parser.make(choose)
    try:
        parser.read(given)
    except parser.errors:
        return
    except Exception as error:
        error.add_note(f"{parser.name} was given {given!r}"[:4000])
        raise
