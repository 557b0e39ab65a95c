"""Result tables, as text: what an experiment prints at its end."""
