"""A job in a browser: `psdctl dashboard`, a separate process that reads the job's status.

    server.py      the process: takes snapshots, listens, ends;  feed.py  what browsers are sent
    pages.py       the addresses that it answers;  admission.py  who may see them
    static/        the page itself, which loads nothing from elsewhere

Needs the extra `ui`, with aiohttp: one well-maintained library, which accepts our own SSL contexts and lets us end open
streams. Starlette and uvicorn would be two libraries, and uvicorn handles signals itself. Must not know flags.
"""
