"""How T.deal shares out the blocks of items: the rule of csrc/include/tileops/deal_part.h, by loops."""

import itertools


def starts(blocks: list[int], parts: int, overhead: int, most: int = 0) -> list[tuple[int, int]]:
    """Item and block where each part begins, and where the last one ends."""
    items, before = len(blocks), 0
    payload = max(-(-sum(count + overhead for count in blocks) // parts), 2)
    slack, together, apart = min(payload // 32, overhead), max(-(-items // parts), 1), max(parts // items, 1)
    length = (-(-max(blocks) // apart) + 1) // 2 * 2
    equal = together * (length + overhead) <= payload + overhead + 1 + slack
    found = [(items, 0)] * (parts + 1)
    for item, count in enumerate(blocks):
        if not equal:
            own = {part: part * payload - before for part in range(parts)}
            own = {part: place for part, place in own.items() if 0 <= place < count + overhead}
            own = {part: max(place - overhead // 2, 0) // 2 * 2 for part, place in own.items()}
            own = {part: 0 if block <= slack else count if count - block <= slack else block for part, block in own.items()}
        elif together > 1:
            own = {item // together: 0} if item % together == 0 else {}
        else:
            own = {item * apart + n: n * length for n in range(apart)}
        pieces = 1
        for part, block in own.items():
            cuts = 0 < block < count and (not most or pieces < most)
            found[part] = (item, block) if cuts else (item + (block > 0), 0)
            pieces += cuts
        before += count + overhead
    return found


def spans(blocks: list[int], parts: int, overhead: int, most: int = 0):
    """(part, item, first block, end) of all pieces, in order."""
    for part, ((first, begin), (last, end)) in enumerate(itertools.pairwise(starts(blocks, parts, overhead, most))):
        for item in range(first, last + (end > 0)):
            yield part, item, begin if item == first else 0, end if item == last and end else blocks[item]
