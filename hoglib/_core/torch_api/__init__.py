"""All private names of torch that hoglib uses, its modes, its operators and its pytrees."""
