"""A training job: the part of ``TrainingJob.spec`` that the trainer acts on, and ``config.json``.

Each fact about a field stands here once: type, default, bounds, known names, description (the text under
it), and the rules over several fields.  The TrainingJob's schema, the trainer's configuration file and
the reference page are made from these classes.
"""
