"""The order of job types with which Gavel's published curves were drawn."""

from ballast_policies.simulator.workloads import in_order

PUBLISHED = in_order("ResNet-18", "ResNet-50", "LM", "A3C", "Transformer", "Recommendation", "CycleGAN")
"""Found from the curves: of all orders of the seven families it alone gives the longest
jobs of seeds 0, 1 and 2 (165.545, 155.888 and 162.057 h, whose mean is the published makespan of 100 to 300
jobs, 161.164 h) together with the completion times at 0.4 jobs/h, where no job waits
(lab/docs/published.md). The order matters because a gang's type is drawn until one comes that runs on several
GPUs: other refusals, other draws from then on.
"""
