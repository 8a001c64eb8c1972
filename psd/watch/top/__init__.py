"""`psdctl top`: a job in a terminal. Only app.py imports Textual, and only a terminal needs it.

columns.py   shards and workers as rows of words, sorted, as wide as the terminal allows
lines.py     the lines above and below the tables; everything as plain text
app.py       the same, live
"""
