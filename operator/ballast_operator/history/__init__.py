"""What has happened: lately, in memory (:mod:`.recent`), and before that, in a file (:mod:`.store`)."""
