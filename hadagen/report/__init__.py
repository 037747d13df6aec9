"""`hadagen report`: the numbers of a tuning database or a bundle, and one page that shows them in a browser.

`sources` reads, `speed`, `knob_effects`, `curves` and `facts` compute plain values, `figures` draws them, and `page`
writes the page. Only the last two need Bokeh.
"""
