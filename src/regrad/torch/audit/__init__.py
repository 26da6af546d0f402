"""The audit: is a planned step the eager step, to the bit, and if not, where did they part?

audit     the public function          world    everything that the step can reach: kept and put back
names     what each piece is called    survey   all of it at one moment, comparable
probe     the borders of segments      runs     one run of some steps, with its surveys
compare   the first difference         tape     operations and lines, one by one
locate    which operation and line     table    what each segment touches
"""
