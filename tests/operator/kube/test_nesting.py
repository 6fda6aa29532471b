"""Objects that are nested more deeply than Python's decoder goes: one of them hides no other."""

import json
import sys

import pytest
from aiohttp import ClientSession, web
from ballast_operator.kube.nesting import MOST_LEVELS, ShallowResponse, read_json, shallow
from hypothesis import given
from hypothesis import strategies as st

DEEP = 9_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(levels, inside="1"):
    """JSON text, objects and lists in turns, with brackets in a key and in a value."""
    half = levels // 2
    return '{"]{\\"":[' * half + inside + "]}" * half


def depth(value):
    levels = 0
    while isinstance(value, dict | list):
        value, levels = next(iter(value.values() if isinstance(value, dict) else value)), levels + 1
    return levels


@pytest.mark.slow
@given(VALUES)
def test_a_value_of_usual_depth_is_as_it_was(value):
    """To the last character."""
    assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 2, DEEP])
def test_a_deep_value_is_cut_and_its_neighbours_are_whole(levels):
    """Python itself would give up on the whole text."""
    text = f'{{"items": [{{"name": "a"}}, {nested(levels)}, {{"name": "b"}}]}}'
    if levels > sys.getrecursionlimit():
        with pytest.raises(RecursionError):
            json.loads(text)
    first, deep, last = read_json(text.encode())["items"]
    assert (first, last) == ({"name": "a"}, {"name": "b"})
    assert depth(deep) == MOST_LEVELS - 2


def test_what_is_no_json_stays_so():
    """A torn answer is an error as before."""
    with pytest.raises(ValueError, match="Expecting"):
        read_json(nested(DEEP)[: DEEP // 2].encode())
    assert shallow("]" * 300) == "]" * 300


async def test_a_watch_continues_after_a_deep_object():
    """Whole lists, and streams of lines in pieces of any size."""
    lines = [b'{"number": 1}', nested(DEEP).encode(), b'{"number": 3}']

    async def answer(request):
        if request.path == "/list":
            return web.Response(text=f"[{nested(DEEP)}, 2]", content_type="application/json")
        stream = web.StreamResponse()
        await stream.prepare(request)
        text = b"\n".join(lines) + b"\n"
        for start in range(0, len(text), 7_001):
            await stream.write(text[start : start + 7_001])
        return stream

    application = web.Application()
    application.router.add_get("/{path}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ClientSession(response_class=ShallowResponse) as session:
        async with session.get(f"{url}/list") as found:
            assert (await found.json())[1] == 2
        async with session.get(f"{url}/watch") as found:
            seen = b"".join([part async for part in found.content.iter_chunked(2**20)])
    await runner.cleanup()
    values = [json.loads(line) for line in seen.splitlines()]
    assert (values[0], values[2]) == ({"number": 1}, {"number": 3})
    assert depth(values[1]) == MOST_LEVELS
