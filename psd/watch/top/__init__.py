"""`psdctl top`: a job that is looked at, in a terminal. Imports Textual in app.py alone, which only a terminal needs.

columns.py   shards and workers as rows of words, sorted, in the width that there is
lines.py     what stands above and below the tables; the whole as plain text
app.py       the same, live
"""
