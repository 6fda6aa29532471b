"""A plan and the messages of its gang, as the tests of the channels send them."""

from ballast_policies.contract.messages import Ack, Proposal, Report, Stage

from tests.support.plans import local_plan

PLAN = local_plan(["a-1-0", "a-1-1"])

REPORT = Report(epoch=1, step=7, loss=2.5, steps_per_second=3.0)

ACK = Ack(epoch=1, step=0)

PROPOSAL = Proposal(
    epoch=1,
    step=7,
    kept_pods=("a-1-0",),
    released_pods=("a-1-1",),
    stages=(Stage(rank=0, first_layer=0, end_layer=4),),
    step_seconds_before=1.0,
    step_seconds_after=1.05,
)
