"""The Grafana dashboard of costs."""

from ballast_operator.generated.panels import HERE, Dashboard, Panel, one

COSTS = Dashboard(
    uid="ballast-costs",
    title="Ballast / Costs",
    panels=(
        Panel(
            title="Cost, by pool",
            description="What the pools' GPUs have cost, held or idle, in the currency of pricePerGpuHour.",
            unit="short",
            stacked=True,
            queries=one(f"max by (pool) (ballast_pool_cost{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Cost, by team",
            description="What the teams' jobs have cost, deleted jobs included.",
            unit="short",
            stacked=True,
            queries=one(f"max by (team) (ballast_team_cost{HERE})", "{{team}}"),
        ),
        Panel(
            title="Budget used",
            description="Cost of all time / budget, of teams whose budget is for all time.",
            unit="percentunit",
            queries=one(
                f"max by (team) (ballast_team_cost{HERE})"
                ' / max by (team) (ballast_team_budget{namespace=~"$namespace", period="Total"})',
                "{{team}}",
            ),
        ),
        Panel(
            title="Waste",
            description="Idle GPUs; start-ups and lost steps of the jobs that are not deleted.",
            unit="short",
            stacked=True,
            queries=one(f"max by (kind) (ballast_wasted_cost{HERE})", "{{kind}}"),
        ),
        Panel(
            title="Goodput",
            description="The productive part of the GPU time of jobs that are not deleted, by pool.",
            unit="percentunit",
            queries=one(f"max by (pool) (ballast_goodput{HERE})", "{{pool}}"),
        ),
        Panel(
            title="What GPUs were held for",
            description="GPU seconds a second, of the jobs that are not deleted: productive, or what not.",
            unit="short",
            stacked=True,
            queries=one(f"max by (use) (deriv(ballast_gpu_seconds{HERE}[10m]))", "{{use}}"),
        ),
        Panel(
            title="Idle, by pool",
            description="Part of a pool's cost in which no job held its GPUs.",
            unit="percentunit",
            queries=one(
                f"max by (pool) (ballast_pool_idle_cost{HERE}) / max by (pool) (ballast_pool_cost{HERE})",
                "{{pool}}",
            ),
        ),
        Panel(
            title="Prices",
            description="Price of a GPU hour that counts.",
            unit="short",
            queries=one(f"max by (pool) (ballast_pool_price_per_gpu_hour{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Age of prices",
            description="Since when the last good price of a price feed holds.",
            unit="s",
            queries=one(f"max by (pool) (ballast_price_age_seconds{HERE})", "{{pool}}"),
        ),
        Panel(
            title="Jobs kept off spot machines",
            description="By spec.spot of the ClusterPolicy.",
            unit="short",
            queries=one(f"max (ballast_jobs_kept_off_spot{HERE})", "jobs"),
        ),
    ),
)
