"""Aligned text and markdown tables."""


def aligned(lines, left=(0,)):
    """Columns of equal width; those in `left` are set left, the others right."""
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    cells = ([f"{v!s:<{w}}" if i in left else f"{v!s:>{w}}" for i, (v, w) in enumerate(zip(line, widths))] for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in cells)


def markdown(lines, left=(0,)):
    """The same as a markdown table; the first line is its head."""
    head, *body = [["" if v is None else str(v).replace("|", "\\|") for v in line] for line in lines]
    rule = [":---" if i in left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *body])
