"""The process that holds a run together: brings the roles up, runs the loop, watches over both."""
