"""The page of a report, drawn by Bokeh, which only this package imports."""
