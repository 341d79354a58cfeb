"""tileops inside other libraries, through the hooks that they offer for it; each module needs its host.

    from tileops.integrations import transformers        # then transformers.register()

Nothing else of tileops imports these modules.
"""
