"""C headers for building the kernels: from rules.py ids, and names for each rule's numbers, flags and slots; from
vector_operations.py numbers.

setup.py writes them into csrc; psd_core checks that its kernels were built with the same.
"""

from __future__ import annotations

import zlib

from psd_core.rules import RULES
from psd_core.vector_operations import KINDS, MAP_FUNCTIONS, ZIP_FUNCTIONS


def c_headers() -> dict[str, str]:
    """Texts of the headers, by file name."""
    rules = RULES.values()
    flags_max = 8 * (max(len(rule.flags) for rule in rules) // 8 + 1)  # a multiple of 8, so that the doubles follow at once
    slots = [f"SLOT_{r.name}_{slot.name}".upper() + f" = {at}" for r in rules for at, slot in enumerate(r.all_slots)]
    structs = ""
    for name, rule in RULES.items():
        flags = ", ".join([*rule.flags, f"unused[{flags_max - len(rule.flags)}]"])
        structs += f"typedef struct {{ struct {{ uint8_t {flags}; }} is; double {', '.join(rule.scalars)}; }} psd_{name};\n"
    plain = f"""/* Made from psd_core/rules.py: the rules' ids, and by which names C knows their flags, scalars and slots. */
#include <stdint.h>
enum {{ {", ".join(f"PSD_{name.upper()}" for name in RULES)}, PSD_RULES }};
enum {{ {", ".join(slots)} }};
#define PSD_FLAGS_MAX {flags_max}
#define PSD_SCALARS_MAX {max(len(rule.scalars) for rule in rules)}
#define PSD_SLOTS_MAX {max(len(rule.all_slots) for rule in rules)}
{structs}typedef union {{
    struct {{ uint8_t flags[PSD_FLAGS_MAX]; double scalars[PSD_SCALARS_MAX]; }};
    {" ".join(f"psd_{name} {name};" for name in RULES)}
}} psd_hyper;
"""
    table = ""
    for name, rule in RULES.items():
        upper, functions = name.upper(), f"FN({name}_prepare), FN(psd_{name}_tile)"
        table += f"    [PSD_{upper}] = {{{len(rule.all_slots)}, {upper}_STEPS_ALIKE_FROM, {functions}}},\n"
    templates = f"""/* Template over `real`, made from psd_core/rules.py: all rules. */
{"".join(f'#include "rule_{name}.h"{chr(10)}' for name in RULES)}typedef union {{
    {" ".join(f"FN({name}) {name};" for name in RULES)}
}} FN(constants);
static const FN(rule) FN(rules)[] = {{
{table}}};
"""
    loops = {kind.loop: KINDS[kind.loop].number for kind in KINDS.values()}
    numbers = ", ".join(f"PSD_V_{name.upper()} = {number}" for name, number in loops.items())
    operations = f"""/* Made from psd_core/vector_operations.py: operations with a loop of their own, built-in functions. */
enum {{ {numbers} }};
enum {{ {", ".join(f"PSD_MAP_{name.upper()}" for name in MAP_FUNCTIONS)} }};
enum {{ {", ".join(f"PSD_ZIP_{name.upper()}" for name in ZIP_FUNCTIONS)} }};
"""
    return {"rules.h": plain, "rule_templates.h": templates, "vector_operations.h": operations}


def checksum() -> int:
    """Checksum of the tables: kernels that were built with others would confuse a rule's numbers."""
    return zlib.crc32("".join(c_headers().values()).encode())
