"""Looking: functions from records to text, DataFrame, HTML and matplotlib figures; tested without a browser."""

from workbench.base import shown
from workbench.views.comparisons import advantage_figure, advantage_table, values_figure, what_if_figure, what_if_table
from workbench.views.curves import figure, panel, save_figure
from workbench.views.faces import FACES
from workbench.views.samples import groups, samples
from workbench.views.seeds import seeds
from workbench.views.tokens import sampler_logprob_diff, tokens
from workbench.views.transcripts import transcript

shown.register(
    FACES,
    text="workbench.views.document:text",
    html="workbench.views.document:html",
    display="workbench.widgets.layer:show",
    cell="workbench.widgets.display:working_cell",
)

__all__ = [
    "advantage_figure", "advantage_table", "figure", "groups", "panel", "sampler_logprob_diff", "samples",
    "save_figure", "seeds", "tokens", "transcript", "values_figure", "what_if_figure", "what_if_table",
]  # fmt: skip
