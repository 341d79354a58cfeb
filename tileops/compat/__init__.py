"""Other libraries' functions over our operators, with their names, arguments and results: a user of theirs changes one import.

    from tileops.compat import flash_mla        # for import flash_mla

Nothing else of tileops imports these modules, and they need none of those libraries.
"""
