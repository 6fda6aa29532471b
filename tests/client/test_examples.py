"""The examples of scripts, as they are: stopped with a checkpoint, resumed, and run to their end."""

import os
from pathlib import Path

import pytest
from ballast_policies.contract.messages import Ack, Report
from ballast_policies.contract.plan import Directive

from tests.client.test_messages import a_plan
from tests.support.examples import first_daily
from tests.support.ports import free_port
from tests.support.scripts import start_script
from tests.support.waiting import eventually

FOLDER = Path(__file__).parents[2] / "examples" / "scripts"

pytestmark = pytest.mark.processes


class Launch:
    """All ranks of a script; the operator is a directory."""

    def __init__(self, script, folder, *, ranks, steps):
        common = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            # The next one is the client's.
            "MASTER_PORT": str(free_port(successive=2)),
            "OMP_NUM_THREADS": "1",
            "BALLAST_CHANNEL": str(folder),
            "BALLAST_RENEW_SECONDS": "0.2",
            "BALLAST_POD_NAME": "job-1-0",
            "BALLAST_TOTAL_STEPS": str(steps),
            "BALLAST_CHECKPOINT_EVERY_STEPS": "100",
            "BALLAST_CHECKPOINT_PATH": str(folder / "checkpoints"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        if ranks == 1:  # frameworks start their own group where they find a launcher's variables
            common = {name: value for name, value in common.items() if not name.startswith("LOCAL_")}
            del common["WORLD_SIZE"], common["MASTER_ADDR"]
        self.errors = folder / "errors"
        self.processes = [
            start_script(
                FOLDER / script,
                {**common, "RANK": str(rank)} if ranks > 1 else common,
                folder=folder,
                errors=self.errors,
            )
            for rank in range(ranks)
        ]

    def end(self):
        """(exit code of each rank, what they wrote to stderr)."""
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes], self.errors.read_text()

    def kill(self):
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def launch(tmp_path):
    """Launches whose processes end with the test."""
    launches = []

    def start(script, **of_launch):
        launches.append(Launch(script, tmp_path, **of_launch))
        return launches[-1]

    yield start
    for each in launches:
        each.kill()


@pytest.mark.parametrize(
    ("script", "ranks"),
    # Ranks that leave together: tests/operator/live/test_client.py, each day.
    first_daily([("hugging_face_trainer.py", 1), ("plain_ddp.py", 2), ("lightning_trainer.py", 1)], 1),
)
def test_a_script_is_stopped_resumes_and_ends(tmp_path, launch, script, ranks):
    """All ranks leave with the code for it; the next launch begins where the checkpoint ends."""
    (tmp_path / "plan.json").write_text(a_plan().to_json())
    first = launch(script, ranks=ranks, steps=1_000_000)
    report = tmp_path / "report.json"

    def trains():
        if any(process.exitcode is not None for process in first.processes):
            pytest.fail(str(first.errors.read_text()))
        return report.exists() and Report.from_json(report.read_text()).step > 0

    eventually(trains, "the script trains")
    (tmp_path / "plan.json").write_text(a_plan(Directive.CHECKPOINT_AND_STOP, epoch=4).to_json())
    codes, text = first.end()
    assert codes == [75] * ranks, text
    ack = Ack.from_json((tmp_path / "ack.json").read_text())
    saved = ack.checkpoint_step
    assert ack.epoch == 4 and saved is not None and saved > 0

    (tmp_path / "plan.json").write_text(a_plan(epoch=5).to_json())
    codes, text = launch(script, ranks=ranks, steps=saved + 15).end()
    assert codes == [0] * ranks, text
    last = Report.from_json(report.read_text())
    assert (last.resumed_from_step, last.step) == (saved, saved + 15)
    assert (tmp_path / "finished-step").read_text() == str(saved + 15)
