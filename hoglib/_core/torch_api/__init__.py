"""torch as hoglib sees it: its private names, its modes, its trees; nothing above has another way."""
