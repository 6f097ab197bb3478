"""Looking: functions from records to text, DataFrame, HTML and matplotlib figures; tested without a browser."""

from workbench.views.curves import panel
from workbench.views.gaps import sampler_gap
from workbench.views.paper import figure, save_figure
from workbench.views.samples import groups, samples
from workbench.views.shelf import estimators, estimators_figure, values_figure, ways, ways_figure
from workbench.views.tokens import tokens
from workbench.views.transcripts import transcript

__all__ = [
    "estimators",
    "estimators_figure",
    "figure",
    "groups",
    "panel",
    "sampler_gap",
    "samples",
    "save_figure",
    "tokens",
    "transcript",
    "values_figure",
    "ways",
    "ways_figure",
]
