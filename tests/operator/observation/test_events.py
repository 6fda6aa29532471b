"""Events that are posted in the background."""

import asyncio

from ballast_operator.kube.kinds import JOB
from ballast_operator.observation.events import MOST_WAITING, EventToPost, Recorder


async def test_a_flood_of_events_is_told_of_once(caplog):
    """While a slow API server takes them: thousands of jobs that change are no thousands of lines."""
    posted, all_posted = [], asyncio.Event()

    class Slow:
        async def create(self, kind, body):
            await asyncio.sleep(0)
            posted.append(body["message"])
            if len(posted) % MOST_WAITING == 0:
                all_posted.set()

    recorder = Recorder(Slow())
    for flood in ("one", "two"):
        for number in range(MOST_WAITING + 100):
            notice = EventToPost(type="Normal", reason="Assigned", message=flood)
            recorder.post(JOB, "n", f"job-{number}", f"uid-{number}", (notice,))
        running = asyncio.create_task(recorder.run())
        await all_posted.wait()
        all_posted.clear()
        running.cancel()
    assert posted == ["one"] * MOST_WAITING + ["two"] * MOST_WAITING
    assert sum("the oldest are dropped" in record.message for record in caplog.records) == 2
