"""A job in a browser: `psdctl dashboard`, a process of its own that looks at the job as any reader does.

    server.py      the process: looks, listens, ends;  feed.py  what browsers are sent
    pages.py       the addresses that it answers;  admission.py  who may see them
    static/        the page itself, which loads nothing from elsewhere

Needs the extra `ui`. aiohttp carries it: one well-kept library, which takes our own SSL contexts, and whose open streams end
when we say so; Starlette and uvicorn would be two, and uvicorn takes the signals for itself. Must not know flags.
"""
