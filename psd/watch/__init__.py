"""A job seen from outside: its shards are asked for their status at intervals. `psdctl top` and `psdctl dashboard` show the
result.

    asking.py     one call to each shard, the one that psdctl status makes
    merging.py    combines the answers;  words.py  puts them into words
    sampler.py    takes snapshots at intervals;  snapshot.py  one snapshot;  rates.py, events.py  what two of them show
    history.py    a bounded history, thinner the older it is;  diagnosis.py  what a snapshot means
    earlier.py    earlier runs, from the files of a log directory
    dashboard/    in a browser;  top/  in a terminal

Takes no part in the job. Must not know flags, terminals or the environment.
"""
