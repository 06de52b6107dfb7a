"""What a switch in the environment may say, in any case of letters."""

ON = ("1", "true", "on")
OFF = ("", "0", "false", "off")
