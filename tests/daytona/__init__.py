"""The Daytona provider on the emulated service, as whoever runs it sees it."""
