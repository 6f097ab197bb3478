"""Looking: functions from records to text, DataFrame, HTML and matplotlib figures; tested without a browser."""

from workbench.views.curves import panel
from workbench.views.samples import groups, samples

__all__ = ["groups", "panel", "samples"]
