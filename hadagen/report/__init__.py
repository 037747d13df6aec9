"""`hadagen report`: the numbers of a tuning database or a bundle, and one page that shows them in a browser.

`sources` reads, `speed`, `against`, `knob_effects`, `curves` and `facts` compute plain values. In `drawing`, `charts`
draws them and `page` writes the page; only these need Bokeh.
"""
