// Runs `gigagrad predict` on the image that is open in QuPath, and brings in the regions that it writes.
//
// Automate > Script editor, open this file, set the names below, Run; for a whole project choose Run > Run for project.
// A second run replaces what the first one brought, and leaves other objects alone.
import qupath.lib.io.PathIO
import qupath.lib.objects.PathObjects

def program = '/opt/gigagrad/bin/gigagrad'  // the program, as `which gigagrad` says
def run = '/data/runs/first'                // what was `--out` of `gigagrad fit`
def out = '/data/predictions'               // where predictions are written
def detections = false                      // true: detections in the place of annotations

def imageData = getCurrentImageData()
def uris = imageData.getServer().getURIs()
def slides = uris.collect { new File(it).path }

def command = [program, 'predict', '--run', run, '--out', out, '--slides', *slides]
def process = new ProcessBuilder(command).redirectErrorStream(true).start()
process.inputStream.eachLine { println it }
if (process.waitFor() != 0)
    throw new RuntimeException('gigagrad could not predict: the line above says why')

// Results are called by their slides, without the suffixes .ome and .cog.
def regions = slides.collectMany { slide ->
    def stem = new File(slide).name.replaceFirst(/\.[^.]*$/, '').replaceFirst(/\.(ome|cog)$/, '')
    PathIO.readObjects(new File(out, "geojson/${stem}.geojson"))
}
def ids = regions*.getID() as Set
if (detections)
    regions = regions.collect { region ->
        def detection = PathObjects.createDetectionObject(region.getROI(), region.getPathClass())
        detection.setID(region.getID())
        detection
    }
def hierarchy = imageData.getHierarchy()
hierarchy.removeObjects(hierarchy.getAllObjects(false).findAll { it.getID() in ids }, true)
hierarchy.addObjects(regions)
println "${imageData.getServer().getMetadata().getName()}: ${regions.size()} regions"
