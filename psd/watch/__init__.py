"""A job seen from outside: its shards are looked at again and again. `psdctl top` and `psdctl dashboard` show what is found.

    asking.py     one call to each shard, the one that psdctl status makes
    merging.py    the answers as one picture;  words.py  in words
    sampler.py    looks, one after the other;  snapshot.py  what one look amounts to;  rates.py, events.py  found by comparing
    history.py    a bounded past of it all, thinner the older it is;  diagnosis.py  what a look means
    dashboard/    in a browser;  top/  in a terminal

A reader takes no part in the job. Must not know flags, terminals or the environment.
"""
