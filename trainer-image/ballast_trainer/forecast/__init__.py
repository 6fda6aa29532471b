"""Forecasts of a configuration on some ranks, from a profile of its layers: no rank is started."""

from ballast_trainer.forecast.forecast import FLOW_STEPS, Forecast, forecast, forecasts, schedule_for
from ballast_trainer.forecast.machines import Machines
from ballast_trainer.forecast.memory import RankForecast

__all__ = ["FLOW_STEPS", "Forecast", "Machines", "RankForecast", "forecast", "forecasts", "schedule_for"]
