"""Past events: lately, in memory (:mod:`.recent`), and before that, in a database (:mod:`.store`)."""
