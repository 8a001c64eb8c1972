"""Files in memory, mapped so that large pages can hold them: kernels that stream through them are a third faster.

Linux gives such files large pages only where the administrator has said so, or where a process asks for each: so does
`LargeMap.make_large`. Every process that maps the file has the use of it, if its map begins at a multiple of a large page.
`punch_hole` gives memory of such a file back. Must not know what lies in them.
"""

from __future__ import annotations

from psd_core._arena import LARGE_PAGE_BYTES, LargeMap, punch_hole

__all__ = ["LARGE_PAGE_BYTES", "LargeMap", "punch_hole"]
